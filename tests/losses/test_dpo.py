"""companion.losses.dpo: values, gradients, bad input."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from companion.losses import dpo_loss

LOGPS = st.floats(-500, 0)
BETAS = st.floats(0.01, 5.0)


def tensors(*values, dtype=torch.float64):
    return [torch.tensor(v if isinstance(v, list) else [v], dtype=dtype) for v in values]


def random_logps(batch=5, seed=0):
    return list(-20 * torch.rand(4, batch, dtype=torch.float64,
                                 generator=torch.Generator().manual_seed(seed)))


@given(st.tuples(LOGPS, LOGPS, LOGPS, LOGPS), BETAS)
def test_the_value_is_minus_log_sigmoid_of_the_margin(logps, beta):
    margin = beta * ((logps[0] - logps[2]) - (logps[1] - logps[3]))
    expected = max(-margin, 0) + math.log1p(math.exp(-abs(margin)))
    assert dpo_loss(*tensors(*logps), beta).item() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@given(st.tuples(LOGPS, LOGPS, LOGPS, LOGPS), BETAS)
def test_the_gradient_is_beta_sigma_of_minus_margin(logps, beta):
    chosen, rejected, *ref = tensors(*logps)
    chosen.requires_grad_(), rejected.requires_grad_()
    margin = beta * ((chosen - ref[0]) - (rejected - ref[1])).detach()
    grads = torch.autograd.grad(dpo_loss(chosen, rejected, *ref, beta), (chosen, rejected))
    weight = beta * torch.sigmoid(-margin)
    torch.testing.assert_close(grads, (-weight, weight), rtol=1e-12, atol=1e-14)


@given(st.tuples(LOGPS, LOGPS, LOGPS, LOGPS), BETAS)
def test_swapping_the_pair_changes_the_loss_by_the_margin(logps, beta):
    chosen, rejected, ref_chosen, ref_rejected = tensors(*logps)
    margin = beta * ((chosen - ref_chosen) - (rejected - ref_rejected)).item()
    loss = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta).item()
    swapped = dpo_loss(rejected, chosen, ref_rejected, ref_chosen, beta).item()
    assert swapped - loss == pytest.approx(margin, rel=1e-9, abs=1e-9)


def test_the_batch_is_a_mean():
    logps = random_logps()
    singles = [dpo_loss(*(t[i : i + 1] for t in logps), 0.3) for i in range(5)]
    torch.testing.assert_close(dpo_loss(*logps, 0.3), torch.stack(singles).mean())


def test_gradcheck():
    chosen, rejected, *ref = random_logps()
    inputs = chosen.requires_grad_(), rejected.requires_grad_()
    assert torch.autograd.gradcheck(lambda c, r: dpo_loss(c, r, *ref, 0.3), inputs)


def test_the_reference_is_data_even_when_it_carries_a_graph():
    logps = [t.requires_grad_() for t in random_logps()]
    dpo_loss(*logps, 0.3).backward()
    assert logps[0].grad is not None and logps[1].grad is not None
    assert logps[2].grad is None and logps[3].grad is None


def test_a_reference_that_shares_the_policys_graph_does_not_cancel_the_gradient():
    chosen, rejected, *_ = (t.requires_grad_() for t in random_logps())
    dpo_loss(chosen, rejected, chosen * 1.0, rejected * 1.0, 0.3).backward()
    torch.testing.assert_close(chosen.grad, torch.full_like(chosen, -0.3 / 2 / 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("margin", [-1e4, 1e4])
def test_huge_margins_stay_finite(dtype, margin):
    chosen, rejected, *ref = tensors(margin, 0.0, 0.0, 0.0, dtype=dtype)
    chosen.requires_grad_()
    loss = dpo_loss(chosen, rejected, *ref, 1.0)
    loss.backward()
    assert loss.dtype == dtype and loss.shape == ()
    assert loss.item() == max(-margin, 0.0)
    assert chosen.grad.item() == (-1.0 if margin < 0 else 0.0)


@pytest.mark.bad_input
@pytest.mark.parametrize("position", range(4))
@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
def test_bad_log_probs_are_named_with_their_position(position, bad):
    names = ["chosen_logps", "rejected_logps", "ref_chosen_logps", "ref_rejected_logps"]
    logps = random_logps()
    logps[position][3] = bad
    with pytest.raises(ValueError, match=rf"^{names[position]}\[3\]"):
        dpo_loss(*logps, 0.1)


@pytest.mark.bad_input
@pytest.mark.parametrize("beta", [0, -0.1, float("nan")])
def test_beta_must_be_positive(beta):
    with pytest.raises(ValueError, match="beta"):
        dpo_loss(*random_logps(), beta)


@pytest.mark.parametrize(
    "chosen, rejected, beta", [(3e38, -3e38, 1.0), (1.0, 0.0, 1e39), (0.0, 0.0, 1e39)]
)
def test_a_margin_that_overflows_is_named(chosen, rejected, beta):
    logps = tensors(chosen, rejected, 0.0, 0.0, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"^margin\[0\] is (inf|nan)"):
        dpo_loss(*logps, beta)


@pytest.mark.bad_input
def test_shapes_that_would_broadcast_are_refused():
    logps = random_logps()
    logps[2] = logps[2][:1]
    with pytest.raises(ValueError, match="ref_chosen_logps must have the shape of chosen_logps"):
        dpo_loss(*logps, 0.1)
