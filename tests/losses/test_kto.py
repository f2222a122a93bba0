"""companion.losses.kto: the reference point, values, gradients, bad input."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from companion.losses import kto_loss, kto_reference_point

LOGPS = st.floats(-300, 0)


def t(*values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


def loss_of(log_ratio, desirable, reference_point, beta=0.1, **weights):
    return kto_loss(
        t(log_ratio), t(0.0), torch.tensor([desirable]), t(reference_point)[0], beta, **weights
    ).item()


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize(
    "log_ratio, desirable, reference_point, expected",
    [
        (2.0, True, 0.0, 0.450166), (2.0, False, 0.0, 0.549834),
        (2.0, True, 1.0, 0.475021), (2.0, False, 1.0, 0.524979),
        (0.0, True, 0.0, 0.5), (0.0, False, 0.0, 0.5),
    ],
)  # fmt: skip
def test_known_values(log_ratio, desirable, reference_point, expected):
    assert loss_of(log_ratio, desirable, reference_point) == pytest.approx(expected, abs=1e-6)


def test_the_reference_point_is_the_mean_log_ratio_and_not_below_zero():
    assert kto_reference_point(t(-1.0, -2.0), t(-4.0, -3.0)).item() == 2.0
    assert kto_reference_point(t(-4.0, -3.0), t(-1.0, -2.0)).item() == 0.0


def test_the_reference_point_carries_no_gradient():
    logps = t(-1.0, -2.0).requires_grad_()
    point = kto_reference_point(logps, t(-4.0, -3.0))
    assert point.shape == () and not point.requires_grad
    # and one that does carry one is data to the loss
    mine, attached = t(-1.0).requires_grad_(), t(0.5).requires_grad_()
    kto_loss(mine, t(-2.0), torch.tensor([True]), attached[0], 0.1).backward()
    assert mine.grad is not None and attached.grad is None


@given(LOGPS, LOGPS, st.floats(0, 50), st.floats(0.01, 2.0), st.booleans())
def test_value_and_gradient(logp, ref_logp, point, beta, desirable):
    logps = t(logp).requires_grad_()
    loss = kto_loss(logps, t(ref_logp), torch.tensor([desirable]), t(point)[0], beta, 2.0, 3.0)
    loss.backward()
    sign, weight = (1, 2.0) if desirable else (-1, 3.0)
    value = torch.sigmoid(t(sign * beta * (logp - ref_logp - point))).item()
    assert loss.item() == pytest.approx(weight * (1 - value), abs=1e-9)
    slope = -sign * weight * beta * value * (1 - value)
    assert logps.grad.item() == pytest.approx(slope, abs=1e-9)


def test_the_gradient_peaks_at_a_quarter_of_beta():
    logps = torch.linspace(-40, 40, 81, dtype=torch.float64).requires_grad_()
    labels = torch.ones(81, dtype=torch.bool)
    kto_loss(logps, torch.zeros(81).double(), labels, t(3.0)[0], 0.5).backward()
    assert logps.grad.abs().argmax().item() == 43  # the log-ratio 3, where the value is 1/2
    assert logps.grad.abs().max().item() == pytest.approx(0.5 / 4 / 81)


def test_weights_act_on_their_own_label():
    logps, labels = t(1.0, -1.0), torch.tensor([True, False])
    desirable, undesirable = (1 - sigmoid(0.1)) / 2, (1 - sigmoid(0.1)) / 2
    loss = kto_loss(logps, t(0.0, 0.0), labels, t(0.0)[0], 0.1, 9.0, 0.25)
    assert loss.item() == pytest.approx(9 * desirable + 0.25 * undesirable, abs=1e-12)


def test_the_batch_is_a_mean_over_both_labels():
    """Not the sum of the labels' means, which would be twice as large here."""
    logps, labels = t(0.0, 0.0, 0.0, 0.0), torch.tensor([True, False, True, False])
    assert kto_loss(logps, logps, labels, t(0.0)[0], 0.1).item() == 0.5


@pytest.mark.parametrize("label", [True, False])
def test_a_batch_of_one_label_is_fine(label):
    labels = torch.tensor([label, label])
    assert kto_loss(t(0.0, 0.0), t(0.0, 0.0), labels, t(0.0)[0], 0.1).item() == 0.5


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "change, message",
    [
        (dict(beta=-1.0), "beta must be a finite number above 0"),
        (dict(desirable_weight=0.0), "desirable_weight must be a finite number above 0"),
        (dict(undesirable_weight=float("nan")), "undesirable_weight must be"),
        (dict(logps=t(-1.0, torch.nan)), r"logps\[1\] is nan"),
        (dict(ref_logps=t(-1.0)), "ref_logps must have the shape of logps"),
        (dict(desirable=torch.tensor([1, 0])), "desirable must be bool"),
        (dict(desirable=torch.tensor([True])), "desirable must have the shape of logps"),
        (dict(reference_point=t(0.0)), "reference_point must be a scalar"),
        (dict(reference_point=t(torch.nan)[0]), "reference_point is nan"),
        (dict(logps=t(-1.0, -1e308), ref_logps=t(0.0, 1e308)), r"gain\[1\] is -inf"),
    ],
)
def test_bad_input_is_named(change, message):
    good = dict(
        logps=t(-1.0, -2.0), ref_logps=t(-1.0, -2.0), desirable=torch.tensor([True, False]),
        reference_point=t(0.0)[0], beta=0.1,
    )  # fmt: skip
    with pytest.raises(ValueError, match=message):
        kto_loss(**(good | change))


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "logps, ref_logps, message",
    [
        (t(-1.0), t(-1.0), "mismatched_logps needs at least 2 rows"),
        (t(-1.0, -1.0), t(-1.0), "ref_mismatched_logps must have the shape"),
        (t(-1.0, -torch.inf), t(-1.0, -1.0), r"mismatched_logps\[1\] is -inf"),
    ],
)
def test_a_bad_reference_batch_is_named(logps, ref_logps, message):
    with pytest.raises(ValueError, match=message):
        kto_reference_point(logps, ref_logps)
