"""companion.losses.checks: errors name the argument and the first bad position."""

import pytest
import torch

from companion.losses.checks import (
    check_finite,
    check_mask,
    check_not_negative,
    check_positive,
    check_shapes,
    check_tokens,
)

pytestmark = pytest.mark.bad_input


def test_good_input_passes():
    check_shapes(1, a=torch.zeros(3), b=torch.ones(3))
    check_finite(a=torch.zeros(3))
    check_positive(beta=0.1, epsilon=1)
    check_not_negative(beta=0, epsilon=0.2)
    logps = torch.tensor([[0.0, float("nan")]])
    real = check_mask(torch.tensor([[1, 0]]), a=logps)
    assert real.tolist() == [[True, False]]
    check_tokens(real, a=logps)


def test_a_sum_that_overflows_is_no_bad_value():
    check_finite(a=torch.full((3,), 3e38))


@pytest.mark.parametrize(
    "b, message",
    [
        (torch.zeros(3, 1), "b must have 1 dimension"),
        (torch.zeros(2), r"b must have the shape of a: \(3,\), got \(2,\)"),
        (torch.zeros(3).double(), "b must have the dtype of a"),
        (torch.zeros(3, device="meta"), "b must have the device of a"),
        (torch.zeros(3).long(), "b must be floating point"),
    ],
)
def test_shapes(b, message):
    with pytest.raises(ValueError, match=message):
        check_shapes(1, a=torch.zeros(3), b=b)


def test_an_empty_batch_is_refused():
    with pytest.raises(ValueError, match="a is empty"):
        check_shapes(1, a=torch.zeros(0))


def test_a_list_is_no_tensor():
    with pytest.raises(TypeError, match="b must be a torch.Tensor, got list"):
        check_shapes(1, a=torch.zeros(1), b=[0.0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_the_first_bad_position_is_named(bad):
    values = torch.zeros(2, 3)
    values[1, 0] = values[1, 2] = bad
    with pytest.raises(ValueError, match=r"logps\[1, 0\] is -?(nan|inf)"):
        check_finite(fine=torch.zeros(1), logps=values)


@pytest.mark.parametrize("bad", [0, -0.1, float("nan"), float("inf"), 10**400])
def test_positive(bad):
    with pytest.raises(ValueError, match="beta must be a finite number above 0"):
        check_positive(beta=bad)


@pytest.mark.parametrize("bad", ["0.1", None, True, torch.tensor(0.1)])
def test_positive_wants_a_number(bad):
    with pytest.raises(TypeError, match="beta must be a number"):
        check_positive(beta=bad)
