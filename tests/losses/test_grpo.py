"""companion.losses: GRPO, Dr. GRPO, DAPO and GSPO, and the surrogate that they share."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from companion.losses import (
    dapo_loss,
    dr_grpo_loss,
    grpo_loss,
    gspo_loss,
    kl_k3,
    overlong_penalty,
)

NAN, INF = math.nan, math.inf


def t(*values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


# All four with the same arguments; ε = .2 on both sides, and lengths of at most 4.
LOSSES = {
    "grpo": lambda *batch: grpo_loss(*batch, 0.2),
    "dr_grpo": lambda *batch: dr_grpo_loss(*batch, 0.2, 4),
    "dapo": lambda *batch: dapo_loss(*batch, 0.2, 0.2),
    "gspo": lambda *batch: gspo_loss(*batch, 0.2),
}
every_loss = pytest.mark.parametrize("loss_of", LOSSES.values(), ids=LOSSES)


def by_hand(name, logps, old_logps, advantages, mask):
    """The equations, one number at a time."""
    total, tokens = 0.0, 0
    for row, old_row, a, real in zip(logps, old_logps, advantages, mask, strict=True):
        gaps = [x - y for x, y, m in zip(row, old_row, real, strict=True) if m]
        if not gaps:
            continue
        if name == "gspo":
            gaps = [sum(gaps) / len(gaps)]
        terms = [min(math.exp(d) * a, min(max(math.exp(d), 0.8), 1.2) * a) for d in gaps]
        total += sum(terms) / len(terms) if name in ("grpo", "gspo") else sum(terms)
        tokens += len(gaps)
    return -total / {"dr_grpo": len(logps) * 4, "dapo": max(1, tokens)}.get(name, len(logps))


batches = st.tuples(
    arrays(float, (3, 4), elements=st.floats(-3, 0)),
    arrays(float, (3, 4), elements=st.floats(-3, 0)),
    arrays(float, 3, elements=st.floats(-2, 2)),
    arrays(bool, (3, 4)),
)


@given(batches)
@pytest.mark.parametrize("name", LOSSES)
def test_against_the_equations(name, batch):
    loss = LOSSES[name](*map(torch.from_numpy, batch))
    expected = by_hand(name, *(x.tolist() for x in batch))
    assert loss.item() == pytest.approx(expected, abs=1e-12)


@given(batches)
@pytest.mark.parametrize("name", LOSSES)
def test_what_stands_under_the_mask_reaches_nothing(name, batch):
    logps, old, advantages, mask = map(torch.from_numpy, batch)
    results = []
    for filler in (0.0, NAN, INF, -INF, 1e30):
        mine = torch.where(mask, logps, filler).requires_grad_()
        loss = LOSSES[name](mine, torch.where(mask, old, filler), advantages, mask)
        loss.backward()
        assert not mine.grad[~mask].any()
        results.append((loss.item(), mine.grad.tolist()))
    assert all(result == results[0] for result in results)


@every_loss
def test_gradients_by_differences(loss_of):
    g = torch.Generator().manual_seed(0)
    logps, old = (-2 * torch.rand(4, 5, generator=g, dtype=torch.float64) for _ in range(2))
    mask = torch.arange(5) < torch.tensor([[5], [2], [1], [3]])
    advantages = t(1.0, -0.5, 2.0, -1.5)
    assert torch.autograd.gradcheck(
        lambda x: loss_of(x, old, advantages, mask), logps.requires_grad_()
    )


@every_loss
def test_only_the_policy_carries_a_gradient(loss_of):
    logps = t(-1.0, -2.0).reshape(2, 1).requires_grad_()
    advantages = t(1.0, -1.0).requires_grad_()
    mask = torch.ones(2, 1)
    # old log-probs that still hang on the policy's graph must not cancel its gradient
    loss = loss_of(logps, logps * 1.0, advantages, mask)
    loss.backward()
    assert advantages.grad is None and (logps.grad != 0).all()


@every_loss
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.float64])
def test_masks_of_any_dtype(loss_of, dtype):
    logps, old = t(-1.0, -2.0).reshape(2, 1), t(-1.1, -1.9).reshape(2, 1)
    reference = loss_of(logps, old, t(1.0, -1.0), torch.ones(2, 1))
    assert loss_of(logps, old, t(1.0, -1.0), torch.ones(2, 1).to(dtype)) == reference


@every_loss
def test_half_the_batch_in_float32(loss_of):
    logps, old = t(-1.0, -2.0).reshape(2, 1).float(), t(-1.1, -1.9).reshape(2, 1).float()
    loss = loss_of(logps, old, t(1.0, -1.0), torch.ones(2, 1))  # advantages in float64
    assert loss.dtype == torch.float32


# The clip: (ratio, advantage) -> objective, slope in the log-ratio


@every_loss
@pytest.mark.parametrize(
    "ratio, advantage, objective, slope",
    [(1.5, 1, 1.2, 0), (1.5, -1, -1.5, -1.5), (0.5, 1, 0.5, 0.5), (0.5, -1, -0.8, 0)],
)
def test_four_cases_of_the_clip(loss_of, ratio, advantage, objective, slope):
    logps = t(math.log(ratio)).reshape(1, 1).requires_grad_()
    loss = loss_of(logps, t(0.0).reshape(1, 1), t(float(advantage)), torch.ones(1, 1))
    loss.backward()
    scale = 1 / 4 if loss_of is LOSSES["dr_grpo"] else 1
    assert -loss.item() == pytest.approx(objective * scale, abs=1e-12)
    assert -logps.grad.item() == pytest.approx(slope * scale, abs=1e-12)


@pytest.mark.parametrize("epsilon_high, objective, slope", [(0.2, 1.2, 0), (0.28, 1.25, 1.25)])
def test_clip_higher(epsilon_high, objective, slope):
    logps = t(math.log(1.25)).reshape(1, 1).requires_grad_()
    loss = dapo_loss(logps, t(0.0).reshape(1, 1), t(1.0), torch.ones(1, 1), 0.2, epsilon_high)
    loss.backward()
    assert -loss.item() == pytest.approx(objective) and -logps.grad.item() == pytest.approx(slope)


# Overflow: harmless where the clip acts, an error where it does not


@every_loss
@pytest.mark.parametrize("dtype, gap", [(torch.float32, 89.0), (torch.float64, 710.0)])
@pytest.mark.parametrize("advantage", [1.0, 5.0])
def test_a_ratio_that_overflows_is_clipped_without_a_nan(loss_of, dtype, gap, advantage):
    logps = t(gap, dtype=dtype).reshape(1, 1).requires_grad_()
    loss = loss_of(logps, torch.zeros(1, 1, dtype=dtype), t(advantage), torch.ones(1, 1))
    loss.backward()
    scale = 4 if loss_of is LOSSES["dr_grpo"] else 1
    assert loss.item() == pytest.approx(-1.2 * advantage / scale, rel=1e-6)
    assert logps.grad.item() == 0


@every_loss
def test_a_ratio_that_overflows_against_a_negative_advantage_is_refused(loss_of):
    logps = torch.tensor([[0.0], [89.0]])
    with pytest.raises(ValueError, match=r"logps − old_logps at \[1.*\] is 89.*overflows"):
        loss_of(logps, torch.zeros(2, 1), torch.tensor([1.0, -1.0]), torch.ones(2, 1))
    # a finite ratio, an infinite product
    logps = torch.tensor([[87.0]])
    with pytest.raises(ValueError, match="overflows"):
        loss_of(logps, torch.zeros(1, 1), torch.tensor([-50.0]), torch.ones(1, 1))
    # large, but a number
    loss = loss_of(logps, torch.zeros(1, 1), torch.tensor([-1.0]), torch.ones(1, 1))
    assert loss.isfinite()


# Normalisers


def test_normalisers_on_unequal_lengths():
    zeros, advantages = torch.zeros(2, 8).double(), t(1.0, -1.0)
    mask = torch.arange(8) < torch.tensor([[2], [8]])
    batch = zeros, zeros, advantages, mask
    assert grpo_loss(*batch, 0.2).item() == pytest.approx(0)
    assert dapo_loss(*batch, 0.2, 0.28).item() == pytest.approx(0.6)
    assert dr_grpo_loss(*batch, 0.2, 10).item() == pytest.approx(0.3)
    assert dr_grpo_loss(*batch, 0.2, 1).item() == pytest.approx(3.0)
    assert gspo_loss(*batch, 4e-4).item() == pytest.approx(0)


@every_loss
def test_padding_changes_nothing(loss_of):
    logps, old = t(-1.0, -2.0).reshape(2, 1), t(-1.1, -1.9).reshape(2, 1)
    narrow = loss_of(logps, old, t(1.0, -1.0), torch.ones(2, 1))
    pads = torch.full((2, 3), NAN).double()
    wide = loss_of(
        torch.cat([logps, pads], 1), torch.cat([old, pads], 1), t(1.0, -1.0),
        torch.tensor([[1, 0, 0, 0]] * 2),
    )  # fmt: skip
    assert wide == narrow


@given(batches, st.integers(1, 2))
def test_parts_of_dapo_sum_to_the_whole(batch, cut):
    logps, old, advantages, mask = map(torch.from_numpy, batch)
    whole = dapo_loss(logps, old, advantages, mask, 0.2, 0.28)
    count = max(1, mask.sum().item())
    for num_tokens in (count, torch.tensor(count)):
        parts = [
            dapo_loss(*(x[part] for x in (logps, old, advantages, mask)), 0.2, 0.28, num_tokens)
            for part in (slice(cut), slice(cut, None))
        ]
        assert sum(parts).item() == pytest.approx(whole.item(), abs=1e-12)


@pytest.mark.parametrize("lengths, grpo, dapo", [([2, 0], -0.5, -1.0), ([0, 0], 0.0, 0.0)])
def test_empty_responses_count_as_0(lengths, grpo, dapo):
    logps = torch.zeros(2, 2).double().requires_grad_()
    mask = torch.arange(2) < torch.tensor(lengths)[:, None]
    batch = logps, torch.zeros(2, 2).double(), t(1.0, -1.0), mask
    for loss, expected in (
        (grpo_loss(*batch, 0.2), grpo),
        (gspo_loss(*batch, 4e-4), grpo),
        (dapo_loss(*batch, 0.2, 0.28), dapo),
    ):
        (gradient,) = torch.autograd.grad(loss, logps)
        assert loss.item() == pytest.approx(expected) and gradient.isfinite().all()


# GSPO's ratio


def test_xi_is_the_geometric_mean_of_the_real_tokens_ratios():
    logps = t([0.1] * 4 + [9.0] * 4)
    mask = torch.tensor([[1] * 4 + [0] * 4])
    wide = gspo_loss(logps, torch.zeros(1, 8).double(), t(1.0), mask, 1.0)
    assert -wide.item() == pytest.approx(1.105171, abs=1e-6)
    clipped = gspo_loss(logps, torch.zeros(1, 8).double(), t(1.0), mask, 4e-4)
    assert -clipped.item() == pytest.approx(1.0004, abs=1e-12)
    both = gspo_loss(t([1.0, -1.0]), torch.zeros(1, 2).double(), t(1.0), torch.ones(1, 2), 1.0)
    assert -both.item() == pytest.approx(1.0, abs=1e-12)
    long = gspo_loss(
        torch.full((1, 100), 0.01).double(), torch.zeros(1, 100).double(), t(1.0),
        torch.ones(1, 100), 1.0,
    )  # fmt: skip
    assert -long.item() == pytest.approx(1.01005, abs=1e-5)


# k3


@pytest.mark.parametrize("d, expected", [(math.log(2), 0.306853), (-math.log(2), 0.193147), (0, 0)])
def test_k3(d, expected):
    assert kl_k3(t(-3.0), t(-3.0 + d)).item() == pytest.approx(expected, abs=1e-6)


@given(st.floats(-20, 0), st.floats(-20, 0))
def test_k3_is_not_negative_and_has_its_slope(logp, ref_logp):
    logps = t(logp).requires_grad_()
    estimate = kl_k3(logps, t(ref_logp))
    estimate.sum().backward()
    assert estimate.item() >= 0
    assert logps.grad.item() == pytest.approx(1 - math.exp(ref_logp - logp), rel=1e-9, abs=1e-12)


def test_k3_keeps_the_digits_of_a_small_difference():
    logps = torch.tensor([-1.0])
    estimate = kl_k3(logps, logps + 2.0**-20).item()  # e^d − 1 in float32 has four digits left
    assert estimate == pytest.approx(2.0**-41, rel=1e-2, abs=0)


def test_the_kl_term_of_grpo_is_the_mean_over_tokens_then_responses():
    logps, ref = t([-1.0, -2.0], [-3.0, NAN]), t([-1.5, -2.5], [-2.0, NAN])
    mask = torch.tensor([[1, 1], [1, 0]])
    zero = grpo_loss(logps, logps, t(0.0, 0.0), mask, 0.2, ref, 0.5)
    k = [math.exp(d) - d - 1 for d in (-0.5, -0.5, 1.0)]
    assert zero.item() == pytest.approx(0.5 * ((k[0] + k[1]) / 2 + k[2]) / 2, abs=1e-12)
    assert grpo_loss(logps, logps, t(0.0, 0.0), mask, 0.2, ref, 0.0).item() == 0


# The overlong penalty


def test_the_three_pieces_of_the_overlong_penalty():
    lengths = torch.tensor([0, 80, 81, 90, 100, 101, 5000])
    expected = [0, 0, -0.05, -0.5, -1, -1, -1]
    assert overlong_penalty(lengths, 100, 20).tolist() == pytest.approx(expected, abs=1e-6)
    assert overlong_penalty(lengths.double(), 100, 20).dtype == torch.float64
    assert overlong_penalty(lengths, 100, 0).tolist() == [0, 0, 0, 0, 0, -1, -1]
    assert overlong_penalty(lengths.reshape(7, 1), 100, 100)[2].item() == pytest.approx(-0.81)


@given(st.integers(0, 300), st.integers(1, 200), st.floats(0, 1))
def test_the_overlong_penalty_falls_from_0_to_minus_1(length, max_length, share):
    cache = int(share * max_length)
    here, next_ = overlong_penalty(torch.tensor([length, length + 1]), max_length, cache).tolist()
    assert -1 <= next_ <= here <= 0
    assert (here == 0) == (length <= max_length - cache)


# Bad input


def batch(**changes):
    arguments = dict(
        logps=torch.full((2, 3), -1.0), old_logps=torch.full((2, 3), -1.0),
        advantages=torch.tensor([1.0, -1.0]), mask=torch.ones(2, 3),
    )  # fmt: skip
    return tuple((arguments | changes).values())


def with_value(value, row=1, column=2):
    logps = torch.full((2, 3), -1.0)
    logps[row, column] = value
    return logps


@pytest.mark.bad_input
@every_loss
@pytest.mark.parametrize(
    "changes, error, message",
    [
        (dict(logps=with_value(NAN)), ValueError, r"logps\[1, 2\] is nan: must be finite on a"),
        (dict(logps=with_value(-INF)), ValueError, r"logps\[1, 2\] is -inf"),
        (dict(old_logps=with_value(INF, 0, 1)), ValueError, r"old_logps\[0, 1\] is inf"),
        (dict(old_logps=torch.zeros(2, 1)), ValueError, "old_logps must have the shape of logps"),
        (dict(old_logps=torch.zeros(2, 3).double()), ValueError, "old_logps must have the dtype"),
        (dict(logps=torch.zeros(2)), ValueError, r"logps must have 2 dimension\(s\)"),
        (dict(logps=[[0.0]]), TypeError, "logps must be a torch.Tensor, got list"),
        (dict(mask=torch.ones(2, 1)), ValueError, "mask must have the shape and device of logps"),
        (dict(mask=torch.ones(2, 3) * 0.5), ValueError, r"mask\[0, 0\] is 0.5: must be 0 or 1"),
        (dict(mask=None), TypeError, "mask must be a torch.Tensor"),
        (dict(advantages=torch.ones(3)), ValueError, r"advantages must be \(2,\) like the rows"),
        (dict(advantages=torch.ones(2, 1)), ValueError, "advantages must have 1 dimension"),
        (dict(advantages=torch.tensor([1.0, NAN])), ValueError, r"advantages\[1\] is nan"),
        (dict(advantages=torch.tensor([1, 0])), ValueError, "advantages must be floating point"),
    ],
)
def test_bad_batches_are_named(loss_of, changes, error, message):
    with pytest.raises(error, match=message):
        loss_of(*batch(**changes))


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: grpo_loss(*batch(), -0.1), ValueError, "epsilon must be .* at least 0, got -0.1"),
        (lambda: grpo_loss(*batch(), NAN), ValueError, "epsilon must be a finite number"),
        (lambda: grpo_loss(*batch(), "0.2"), TypeError, "epsilon must be a number, got str"),
        (lambda: grpo_loss(*batch(), 0.2, beta=0.1), ValueError, "ref_logps is missing: β = 0.1"),
        (lambda: grpo_loss(*batch(), 0.2, torch.zeros(2, 3), -0.1), ValueError, "beta must be"),
        (lambda: grpo_loss(*batch(), 0.2, with_value(NAN), 0.1), ValueError, r"ref_logps\[1, 2\]"),
        (lambda: grpo_loss(*batch(), 0.2, torch.zeros(2, 1), 0.1), ValueError,
         "ref_logps must have the shape of logps"),
        (lambda: grpo_loss(*batch(), 0.2, torch.full((2, 3), 99.0), 0.1), ValueError,
         r"estimates\[0, 0\] is inf"),
        (lambda: dr_grpo_loss(*batch(), 0.2, 0), ValueError, "max_completion_length must be"),
        (lambda: dr_grpo_loss(*batch(), -1, 8), ValueError, "epsilon must be"),
        (lambda: dapo_loss(*batch(), -0.1, 0.2), ValueError, "epsilon_low must be"),
        (lambda: dapo_loss(*batch(), 0.1, -0.2), ValueError, "epsilon_high must be"),
        (lambda: dapo_loss(*batch(), 0.1, 0.2, 0), ValueError, "num_tokens must be"),
        (lambda: dapo_loss(*batch(), 0.1, 0.2, torch.tensor(NAN)), ValueError, "num_tokens must"),
        (lambda: gspo_loss(*batch(), INF), ValueError, "epsilon must be"),
        (lambda: kl_k3(torch.zeros(2), torch.zeros(3)), ValueError, "ref_logps must have the"),
        (lambda: kl_k3(0.0, torch.zeros(3)), TypeError, "logps must be a torch.Tensor"),
        (lambda: kl_k3(torch.tensor([NAN]), torch.zeros(1)), ValueError, r"logps\[0\] is nan"),
        (lambda: overlong_penalty([1], 10, 5), TypeError, "lengths must be a torch.Tensor"),
        (lambda: overlong_penalty(torch.tensor([5, -1]), 10, 5), ValueError, r"lengths\[1\] is -1"),
        (lambda: overlong_penalty(torch.tensor(NAN), 10, 5), ValueError, "lengths is nan"),
        (lambda: overlong_penalty(torch.tensor([1]), 0, 0), ValueError, "max_length must be"),
        (lambda: overlong_penalty(torch.tensor([1]), 10, -1), ValueError, "cache must be"),
        (lambda: overlong_penalty(torch.tensor([1]), 10, 11), ValueError, "cache is 11: must be"),
    ],
)  # fmt: skip
def test_other_bad_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
