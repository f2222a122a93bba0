"""companion.losses.ipo: both forms, values, gradients, bad input."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from companion.losses import ipo_loss

LOGPS = st.floats(-500, 0)
BETAS = st.floats(0.01, 5.0)


def t(*values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


def test_the_sum_form_and_the_per_token_form_differ():
    logps = t(4.0), t(-2.0), t(0.0), t(0.0)
    assert ipo_loss(*logps, 0.1).item() == pytest.approx(1.0, abs=1e-12)
    assert ipo_loss(*logps, 0.1, t(4.0), t(2.0)).item() == pytest.approx(9.0, abs=1e-12)


@pytest.mark.parametrize("lengths", [(), (torch.tensor([3]), torch.tensor([5]))])
def test_both_forms_start_at_one_over_four_beta_squared(lengths):
    logps = t(-3.0), t(-8.0), t(-3.0), t(-8.0)
    assert ipo_loss(*logps, 0.1, *lengths).item() == pytest.approx(25.0, abs=1e-12)


@given(st.tuples(LOGPS, LOGPS, LOGPS, LOGPS), BETAS, st.integers(1, 9), st.integers(1, 9))
def test_value_and_gradient(logps, beta, n_w, n_l):
    chosen, rejected, ref_chosen, ref_rejected = (t(x) for x in logps)
    chosen.requires_grad_(), rejected.requires_grad_()
    gap = (logps[0] - logps[2]) / n_w - (logps[1] - logps[3]) / n_l - 1 / (2 * beta)
    loss = ipo_loss(
        chosen, rejected, ref_chosen, ref_rejected, beta, torch.tensor([n_w]), torch.tensor([n_l])
    )
    grads = torch.autograd.grad(loss, (chosen, rejected))
    assert loss.item() == pytest.approx(gap**2, rel=1e-9, abs=1e-12)
    assert grads[0].item() == pytest.approx(2 * gap / n_w, rel=1e-9, abs=1e-12)
    assert grads[1].item() == pytest.approx(-2 * gap / n_l, rel=1e-9, abs=1e-12)


def test_lengths_of_one_give_the_sum_form():
    logps = t(-3.0, -1.0), t(-8.0, -2.0), t(-4.0, -5.0), t(-7.0, -1.0)
    ones = torch.ones(2, dtype=torch.long)
    torch.testing.assert_close(ipo_loss(*logps, 0.3, ones, ones), ipo_loss(*logps, 0.3))


def test_the_batch_is_a_mean_and_the_reference_is_data():
    logps = [t(-3.0, -1.0), t(-8.0, -2.0), t(-4.0, -5.0), t(-7.0, -1.0)]
    singles = [ipo_loss(*(x[i : i + 1] for x in logps), 0.3) for i in range(2)]
    torch.testing.assert_close(ipo_loss(*logps, 0.3), torch.stack(singles).mean())
    leaves = [x.clone().requires_grad_() for x in logps]
    ipo_loss(*leaves, 0.3).backward()
    assert leaves[0].grad is not None and leaves[1].grad is not None
    assert leaves[2].grad is None and leaves[3].grad is None


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "change, message",
    [
        (dict(beta=0.0), "beta must be a finite number above 0"),
        (dict(chosen_logps=t(-1.0, -torch.inf)), r"chosen_logps\[1\] is -inf"),
        (dict(ref_rejected_logps=t(-1.0)), "ref_rejected_logps must have the shape"),
        (dict(rejected_lengths=None), "rejected_lengths is missing"),
        (dict(chosen_lengths=None), "chosen_lengths is missing"),
        (dict(chosen_lengths=torch.tensor([2, 0])), r"chosen_lengths\[1\] is 0: must be at least"),
        (dict(rejected_lengths=t(2.0, torch.nan)), r"rejected_lengths\[1\] is nan"),
        (dict(rejected_lengths=torch.tensor([[1], [1]])), "rejected_lengths must have the shape"),
        (dict(chosen_logps=t(-1.0, -1e200)), r"squares\[1\] is inf"),
    ],
)
def test_bad_input_is_named(change, message):
    good = dict(
        chosen_logps=t(-1.0, -2.0), rejected_logps=t(-1.0, -2.0), ref_chosen_logps=t(-1.0, -2.0),
        ref_rejected_logps=t(-1.0, -2.0), beta=0.1, chosen_lengths=torch.tensor([1, 2]),
        rejected_lengths=torch.tensor([2, 2]),
    )  # fmt: skip
    with pytest.raises(ValueError, match=message):
        ipo_loss(**(good | change))
