"""companion.losses.reward_model: values, gradients, bad input."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from companion.losses import reward_model_loss

REWARDS = st.lists(st.floats(-300, 300), min_size=1, max_size=5)


def t(*values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "margin, expected", [(0, 0.693147), (1, 0.313262), (-1, 1.313262), (-200, 200.0)]
)
def test_known_values_have_finite_gradients(margin, expected, dtype):
    chosen = t(float(margin), dtype=dtype).requires_grad_()
    loss = reward_model_loss(chosen, t(0.0, dtype=dtype))
    loss.backward()
    assert loss.dtype == dtype and loss.shape == ()
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    assert chosen.grad.item() == pytest.approx(-1 / (1 + math.exp(margin)), abs=1e-6)


@given(REWARDS, st.floats(-100, 100))
def test_a_shift_of_both_rewards_changes_nothing(rewards, shift):
    chosen, rejected = t(*rewards), t(*reversed(rewards))
    shifted = reward_model_loss(chosen + shift, rejected + shift)
    torch.testing.assert_close(shifted, reward_model_loss(chosen, rejected), atol=1e-9, rtol=1e-9)


@given(REWARDS)
def test_the_batch_is_a_mean_and_both_rewards_have_gradients(rewards):
    chosen, rejected = t(*rewards).requires_grad_(), torch.zeros(len(rewards)).double()
    rejected.requires_grad_()
    loss = reward_model_loss(chosen, rejected)
    singles = [
        reward_model_loss(*pair)
        for pair in zip(chosen.split(1), rejected.split(1), strict=True)
    ]
    torch.testing.assert_close(loss, torch.stack(singles).mean())
    loss.backward()
    torch.testing.assert_close(chosen.grad, -rejected.grad)
    torch.testing.assert_close(chosen.grad, -torch.sigmoid(-chosen.detach()) / len(rewards))


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "chosen, rejected, message",
    [
        (torch.zeros(2, 1), torch.zeros(2, 1), "rewards_chosen must have 1 dimension"),
        (torch.zeros(2), torch.zeros(3), "rewards_rejected must have the shape of rewards_chosen"),
        (torch.zeros(2), torch.tensor([0.0, torch.nan]), r"rewards_rejected\[1\] is nan"),
        (torch.tensor([3e38]), torch.tensor([-3e38]), r"margin\[0\] is inf"),
    ],
)
def test_bad_input_is_named(chosen, rejected, message):
    with pytest.raises(ValueError, match=message):
        reward_model_loss(chosen, rejected)
