"""companion.losses.gae: the recursion, its two limits, padding, whitening, bad input."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from companion.losses import gae, whiten

NAN = math.nan


def t(*values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


episodes = st.tuples(
    arrays(float, (2, 5), elements=st.floats(-3, 3)),
    arrays(float, (2, 5), elements=st.floats(-3, 3)),
    st.lists(st.integers(0, 5), min_size=2, max_size=2),
).map(lambda drawn: (*map(torch.from_numpy, drawn[:2]), drawn[2]))


def mask_of(lengths):
    return torch.arange(5) < torch.tensor(lengths)[:, None]


def test_known_values():
    rewards, values = t([0, 0, 1.0]), t([0.5, 0.6, 0.7])
    advantages, returns = gae(rewards, values, torch.ones(1, 3), 1.0, 0.95)
    assert advantages[0].tolist() == pytest.approx([0.46575, 0.385, 0.3], abs=1e-12)
    assert returns[0].tolist() == pytest.approx([0.96575, 0.985, 1.0], abs=1e-12)
    padded = gae(t([0, 0, 1.0, NAN]), t([0.5, 0.6, 0.7, 2]), t([1, 1, 1, 0]), 1.0, 0.95)
    assert padded[0][0].tolist() == pytest.approx([0.46575, 0.385, 0.3, 0], abs=1e-12)
    assert padded[1][0].tolist() == pytest.approx([0.96575, 0.985, 1.0, 0], abs=1e-12)


@given(episodes, st.floats(0, 1), st.floats(0, 1))
def test_the_recursion_is_the_weighted_sum_of_td_errors(episode, gamma, lam):
    rewards, values, lengths = episode
    advantages, returns = gae(rewards, values, mask_of(lengths), gamma, lam)
    for row, n in enumerate(lengths):
        v = values[row, :n].tolist() + [0.0]
        deltas = [rewards[row, k].item() + gamma * v[k + 1] - v[k] for k in range(n)]
        for k in range(5):
            expected = sum((gamma * lam) ** (j - k) * deltas[j] for j in range(k, n))
            assert advantages[row, k].item() == pytest.approx(expected, abs=1e-10)
            expected_return = expected + v[k] if k < n else 0.0
            assert returns[row, k].item() == pytest.approx(expected_return, abs=1e-10)


@given(episodes)
def test_lambda_1_is_the_return_and_lambda_0_the_td_error(episode):
    rewards, values, lengths = episode
    mask = mask_of(lengths)
    _, returns = gae(rewards, values, mask, 1.0, 1.0)
    total = torch.where(mask, rewards, 0.0).flip(-1).cumsum(-1).flip(-1)
    assert torch.allclose(returns, torch.where(mask, total, 0.0), atol=1e-10)
    advantages, _ = gae(rewards, values, mask, 0.9, 0.0)
    after = torch.where(mask, values, 0.0)
    after = torch.cat([after[:, 1:], torch.zeros(2, 1)], 1)
    expected = torch.where(mask, rewards + 0.9 * after - values, 0.0)
    assert torch.allclose(advantages, expected, atol=1e-10)


@given(episodes)
def test_padding_reaches_nothing(episode):
    rewards, values, lengths = episode
    mask = mask_of(lengths)
    clean = gae(rewards, values, mask)
    dirty = gae(*(torch.where(mask, x, NAN) for x in (rewards, values)), mask.int())
    assert all(map(torch.equal, clean, dirty))


def test_they_are_data():
    both = gae(t([1.0, 2.0]).requires_grad_(), t([1.0, 2.0]).requires_grad_(), torch.ones(1, 2))
    assert not any(x.requires_grad for x in both)
    assert not whiten(t([1.0, 2.0]).requires_grad_(), torch.ones(1, 2)).requires_grad


@given(st.lists(st.floats(-50, 50), min_size=2, max_size=6), st.booleans())
def test_whitening_against_the_definition(values, shift_mean):
    row = t(values + [NAN, 7.0])
    mask = t([1.0] * len(values) + [0, 0])
    whitened = whiten(row, mask, shift_mean)[0].tolist()
    mean, variance = statistics.fmean(values), statistics.variance(values)
    for value, result in zip(values, whitened, strict=False):
        expected = (value - mean) / math.sqrt(variance + 1e-8)
        assert result == pytest.approx(expected + (0 if shift_mean else mean), abs=1e-7)
    assert whitened[-2:] == [0, 0]


@pytest.mark.parametrize("mask", [[0, 0, 0], [0, 1, 0]])
@pytest.mark.parametrize("shift_mean", [True, False])
def test_fewer_than_two_tokens_whiten_to_0(mask, shift_mean):
    assert not whiten(t([3.0, 4.0, 5.0]), torch.tensor([mask]), shift_mean).any()


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: gae(t([1.0, NAN]), t([0.0, 0.0]), t([1, 1])), ValueError, r"rewards\[0, 1\] is"),
        (lambda: gae(t([1.0, 0.0]), t([-math.inf, 0.0]), t([1, 1])), ValueError, r"values\[0, 0\]"),
        (lambda: gae(t([1.0, 0.0]), t([0.0]), t([1, 1])), ValueError, "values must have the shape"),
        (lambda: gae(t([0.0] * 3), t([0.0] * 3), t([1, 0, 1])), ValueError,
         r"mask\[0, 2\] is 1 after a 0: must be padded on the right, without holes"),
        (lambda: gae(t([0.0] * 3), t([0.0] * 3), t([0, 1, 1])), ValueError, r"mask\[0, 1\]"),
        (lambda: gae(t([0.0]), t([0.0]), t([2])), ValueError, r"mask\[0, 0\] is 2.0: must be 0"),
        (lambda: gae(t([0.0]), t([0.0]), t([1]), 1.1), ValueError, "gamma must be at most 1"),
        (lambda: gae(t([0.0]), t([0.0]), t([1]), 1.0, -0.1), ValueError, "lam must be"),
        (lambda: gae(t([0.0]), t([0.0]), t([1]), 1.0, "1"), TypeError, "lam must be a number"),
        (lambda: whiten(t([NAN]), t([1])), ValueError, r"values\[0, 0\] is nan"),
        (lambda: whiten([1.0], t([1])), TypeError, "values must be a torch.Tensor"),
        (lambda: whiten(t([1.0]), t([1, 1])), ValueError, "mask must have the shape"),
    ],
)  # fmt: skip
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
