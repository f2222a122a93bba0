"""companion.losses.ppo: rewards per token, policy and value loss, bad input."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from companion.losses import kl_penalized_rewards, ppo_policy_loss, ppo_value_loss

NAN = math.nan


def t(*values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


numbers = arrays(float, (3, 4), elements=st.floats(-3, 0))
masks = arrays(bool, (3, 4))


# The rewards of (4.10)


def test_the_score_stands_on_the_last_real_token_and_the_penalty_on_each():
    logps, ref = t([-1.0, -2.0, NAN], [-1.0, -1.0, -1.0]), t([-1.5, -1.0, 5], [-1.0, -1.0, -2.0])
    rewards = kl_penalized_rewards(t(3.0, -1.0), logps, ref, t([1, 1, 0], [1, 1, 1]), 0.1)
    expected = [[-0.05, 0.1 + 3.0, 0], [0, 0, -0.1 - 1.0]]
    assert rewards.tolist() == [pytest.approx(row, abs=1e-12) for row in expected]


@given(numbers, numbers, masks, st.floats(0, 2))
def test_they_sum_to_the_score_less_the_log_ratio(logps, ref, mask, beta):
    mask[:, 0] = True
    logps, ref, mask = map(torch.from_numpy, (logps, ref, mask))
    scores = t(1.0, -2.0, 0.5)
    rewards = kl_penalized_rewards(scores, logps, ref, mask, beta)
    expected = scores - beta * torch.where(mask, logps - ref, 0.0).sum(-1)
    assert torch.allclose(rewards.sum(-1), expected, atol=1e-12)
    assert not rewards[~mask].any()


def test_rewards_are_data():
    scores, logps = t(1.0).requires_grad_(), t([-1.0]).requires_grad_()
    assert not kl_penalized_rewards(scores, logps, t([0.0]), t([1]), 0.1).requires_grad


# The policy's loss


def policy_by_hand(logps, old, advantages, mask):
    terms = [
        min(math.exp(x - y) * a, min(max(math.exp(x - y), 0.8), 1.2) * a)
        for row in zip(logps, old, advantages, mask, strict=True)
        for x, y, a, m in zip(*row, strict=True)
        if m
    ]
    return -sum(terms) / max(1, len(terms))


@given(numbers, numbers, arrays(float, (3, 4), elements=st.floats(-2, 2)), masks)
def test_the_policy_loss_is_the_token_mean_whatever_stands_under_the_mask(
    logps, old, advantages, mask
):
    expected = policy_by_hand(*(x.tolist() for x in (logps, old, advantages, mask)))
    logps, old, advantages, mask = map(torch.from_numpy, (logps, old, advantages, mask))
    gradients = []
    for filler in (0.0, NAN, -math.inf):
        mine = torch.where(mask, logps, filler).requires_grad_()
        others = (torch.where(mask, x, filler) for x in (old, advantages))
        loss = ppo_policy_loss(mine, *others, mask, 0.2)
        loss.backward()
        assert loss.item() == pytest.approx(expected, abs=1e-12)
        gradients.append(mine.grad)
    assert torch.equal(gradients[0], gradients[1]) and torch.equal(gradients[0], gradients[2])


@pytest.mark.parametrize(
    "ratio, advantage, objective, slope",
    [(1.5, 1, 1.2, 0), (1.5, -1, -1.5, -1.5), (0.5, 1, 0.5, 0.5), (0.5, -1, -0.8, 0)],
)
def test_four_cases_of_the_clip(ratio, advantage, objective, slope):
    logps = t([math.log(ratio)]).requires_grad_()
    loss = ppo_policy_loss(logps, t([0.0]), t([float(advantage)]), t([1]), 0.2)
    loss.backward()
    assert -loss.item() == pytest.approx(objective) and -logps.grad.item() == pytest.approx(slope)


def test_old_log_probs_on_the_policys_graph_do_not_cancel_its_gradient():
    logps = t([-1.0, -2.0]).requires_grad_()
    ppo_policy_loss(logps, logps * 1.0, t([1.0, -1.0]), torch.ones(1, 2), 0.2).backward()
    assert logps.grad[0].tolist() == pytest.approx([-0.5, 0.5])


@pytest.mark.parametrize("advantage, refused", [(1.0, False), (-1.0, True)])
def test_a_ratio_that_overflows(advantage, refused):
    logps = torch.tensor([[0.0, 89.0]]).requires_grad_()
    advantages = torch.tensor([[1.0, advantage]])
    if refused:
        with pytest.raises(ValueError, match=r"\[0, 1\] is 89.*overflows"):
            ppo_policy_loss(logps, torch.zeros(1, 2), advantages, torch.ones(1, 2), 0.2)
        return
    loss = ppo_policy_loss(logps, torch.zeros(1, 2), advantages, torch.ones(1, 2), 0.2)
    loss.backward()
    assert loss.item() == pytest.approx(-1.1) and logps.grad[0].tolist() == [-0.5, 0]


# The value's loss


@pytest.mark.parametrize(
    "value, old, target, loss, slope",
    [
        (0.5, 0.0, 1.0, 0.32, 0.0),  # moved 0.5 towards the target: clipped to 0.2, no gradient
        (0.1, 0.0, 1.0, 0.405, -0.9),  # inside the clip
        (-0.5, 0.0, 1.0, 1.125, -1.5),  # moved away: the unclipped square is the larger one
        (0.5, 0.0, 0.3, 0.02, 0.2),  # past the target: unclipped .04, clipped .01
    ],
)
def test_cases_of_the_value_clip(value, old, target, loss, slope):
    values = t([value]).requires_grad_()
    result = ppo_value_loss(values, t([old]), t([target]), t([1]), 0.2)
    result.backward()
    assert result.item() == pytest.approx(loss) and values.grad.item() == pytest.approx(slope)


@given(numbers, numbers, numbers, masks)
def test_the_value_loss_is_the_token_mean_whatever_stands_under_the_mask(values, old, target, mask):
    squares = [
        max((v - r) ** 2, (min(max(v, o - 0.3), o + 0.3) - r) ** 2)
        for row in zip(values, old, target, mask, strict=True)
        for v, o, r, m in zip(*row, strict=True)
        if m
    ]
    mask = torch.from_numpy(mask)
    for filler in (0.0, NAN):
        columns = [torch.where(mask, torch.from_numpy(x), filler) for x in (values, old, target)]
        columns[0].requires_grad_()
        loss = ppo_value_loss(*columns, mask, 0.3)
        loss.backward()
        assert loss.item() == pytest.approx(0.5 * sum(squares) / max(1, len(squares)), abs=1e-12)
        assert columns[0].grad.isfinite().all() and not columns[0].grad[~mask].any()


def test_only_the_value_carries_a_gradient():
    columns = [t([x]).requires_grad_() for x in (1.0, 1.1, 2.0)]
    ppo_value_loss(*columns, t([1]), 0.2).backward()
    assert [x.grad is None for x in columns] == [False, True, True]


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: kl_penalized_rewards(t(1.0, 2.0), t([0.0], [0.0]), t([0.0], [0.0]),
                                      t([1], [0]), 0.1), ValueError, r"mask\[1\] has no real"),
        (lambda: kl_penalized_rewards(t(1.0, 2.0), t([0.0]), t([0.0]), t([1]), 0.1), ValueError,
         r"scores must be \(1,\) like the rows"),
        (lambda: kl_penalized_rewards(t(NAN), t([0.0]), t([0.0]), t([1]), 0.1), ValueError,
         r"scores\[0\] is nan"),
        (lambda: kl_penalized_rewards(t(1.0), t([0.0]), t([0.0]), t([1]), -0.1), ValueError,
         "beta must be"),
        (lambda: kl_penalized_rewards(t(1.0), t([0.0]), t([NAN]), t([1]), 0.1), ValueError,
         r"ref_logps\[0, 0\] is nan"),
        (lambda: ppo_policy_loss(t([0.0]), t([0.0]), t(1.0), t([1]), 0.2), ValueError,
         "advantages must have 2 dimension"),
        (lambda: ppo_policy_loss(t([0.0]), t([0.0]), t([NAN]), t([1]), 0.2), ValueError,
         r"advantages\[0, 0\] is nan"),
        (lambda: ppo_policy_loss(t([NAN]), t([0.0]), t([1.0]), t([1]), 0.2), ValueError,
         r"logps\[0, 0\] is nan"),
        (lambda: ppo_policy_loss(t([0.0]), t([0.0]), t([1.0]), t([1]), -1), ValueError,
         "epsilon must be"),
        (lambda: ppo_value_loss(t([0.0]), t([0.0]), t([math.inf]), t([1]), 0.2), ValueError,
         r"returns\[0, 0\] is inf"),
        (lambda: ppo_value_loss(t([0.0]), t([0.0, 0.0]), t([0.0]), t([1]), 0.2), ValueError,
         "old_values must have the shape of values"),
        (lambda: ppo_value_loss(t([1e200]), t([1e200]), t([0.0]), t([1]), 0.2), ValueError,
         r"squares\[0, 0\] is inf"),
        (lambda: ppo_value_loss([0.0], t([0.0]), t([0.0]), t([1]), 0.2), TypeError,
         "values must be a torch.Tensor"),
    ],
)  # fmt: skip
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
