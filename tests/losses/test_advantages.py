"""companion.losses.advantages: groups, what is not scored, equal rewards, bad input."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from companion.losses import degenerate_groups, group_advantages

REWARD = st.floats(-100, 100)
NAN = math.nan


def t(*values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


def close(actual, *expected, tol=1e-6):
    assert actual.tolist() == pytest.approx(expected, abs=tol)


@pytest.mark.parametrize(
    "rewards, group_size, scale, expected",
    [
        ((1, 0, 0, 0), 4, "group", (1.499700, -0.499900, -0.499900, -0.499900)),
        ((1, 0, 0, 0), 4, "none", (0.75, -0.25, -0.25, -0.25)),
        ((1, 0), 2, "group", (0.707007, -0.707007)),
        ((1, 0, 5, 7), 2, "none", (0.5, -0.5, -1, 1)),
        ((1, NAN, 0, 0), 4, "group", (1.154500, 0, -0.577250, -0.577250)),
        ((1, NAN, 0, 0), 4, "none", (2 / 3, 0, -1 / 3, -1 / 3)),
        ((1, NAN, NAN, NAN), 4, "group", (0, 0, 0, 0)),
    ],
)
def test_known_values(rewards, group_size, scale, expected):
    close(group_advantages(t(*rewards), group_size, scale), *expected)


def test_none_in_a_list_is_nan_in_a_tensor():
    close(group_advantages([1, None, 0, 0], 4), 1.154500, 0, -0.577250, -0.577250)


@given(st.lists(st.lists(REWARD, min_size=3, max_size=3), min_size=1, max_size=4))
def test_against_the_definition(groups):
    flat = [r for group in groups for r in group]
    expected = []
    for group in groups:
        mean, std = statistics.fmean(group), statistics.stdev(group)
        expected += [0.0 if min(group) == max(group) else (r - mean) / (std + 1e-4) for r in group]
    close(group_advantages(t(*flat), 3), *expected)


@given(st.lists(REWARD, min_size=4, max_size=4), st.floats(-50, 50), st.floats(0.5, 4))
def test_a_shift_of_the_rewards_changes_nothing_and_a_factor_passes_through(rewards, shift, factor):
    plain = group_advantages(t(*rewards), 4, "none")
    close(group_advantages(t(*rewards) * factor + shift, 4, "none"), *(plain * factor).tolist())
    assert plain.sum().item() == pytest.approx(0, abs=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group_size", [2, 3, 7])
def test_equal_rewards_give_exactly_0(dtype, group_size):
    for value in (0.0, 0.1, 1.0, -7.3, 1e4):
        rewards = torch.full((2 * group_size,), value, dtype=dtype)
        for scale in ("group", "none"):
            advantages = group_advantages(rewards, group_size, scale)
            assert advantages.dtype == dtype and not advantages.any()
        assert degenerate_groups(rewards, group_size).tolist() == [True, True]


def test_they_are_data():
    assert not group_advantages(t(1.0, 0.0).requires_grad_(), 2).requires_grad


def test_interleaved_prompts_are_grouped_by_prompt():
    rewards = t(1.0, 0.0, 1.0, 0.0)
    close(group_advantages(rewards, 2, prompts=list("ABAB")), 0, 0, 0, 0, tol=0)
    assert group_advantages(rewards, 2)[0].item() == pytest.approx(0.707007, abs=1e-6)


@given(st.permutations(range(8)))
def test_the_order_of_the_rows_does_not_matter_when_prompts_are_named(order):
    rewards, prompts = t(1, 0, 0, 0, 3, 2, 2, 9), "AAAABBBB"
    expected = group_advantages(rewards, 4)
    shuffled = group_advantages(rewards[order], 4, prompts=[prompts[i] for i in order])
    close(shuffled, *expected[order].tolist(), tol=1e-12)


def test_a_prompt_drawn_twice_is_two_groups():
    rewards = t(1, 0, 5, 7)
    close(group_advantages(rewards, 2, "none", prompts="AAAA"), 0.5, -0.5, -1, 1)


def test_all_unscored_is_0_with_a_warning():
    with pytest.warns(UserWarning, match="no row of rewards is scored"):
        assert not group_advantages(t(NAN, NAN), 2).any()


@pytest.mark.parametrize(
    "rewards, expected",
    [
        ((1, 1, 0, 0, 1, 0), (True, True, False)),
        ((1, NAN, NAN, NAN, 0.5, 0.25), (True, True, False)),
    ],
)
def test_degenerate_groups(rewards, expected):
    assert degenerate_groups(t(*rewards), 2).tolist() == list(expected)


def test_what_is_not_scored_does_not_make_a_group_degenerate_nor_save_it():
    assert degenerate_groups([1, None, 0, None, 1, 1], 3).tolist() == [False, True]


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ((t(1.0), 1), ValueError, "group_size is 1: a group needs G ≥ 2"),
        ((t(1.0, 0.0), 0), ValueError, "G ≥ 2"),
        ((t(1.0, 0.0), 2.0), TypeError, "group_size must be a whole number"),
        ((t(1.0, 0.0), True), TypeError, "group_size must be a whole number"),
        ((t(1.0, 0.0, 1.0), 2), ValueError, "rewards has 3 rows: must be a multiple of group_size"),
        ((t(), 2), ValueError, "rewards has 0 rows"),
        ((t(1.0, 0.0).reshape(1, 2), 2), ValueError, "rewards must have 1 dimension"),
        ((torch.tensor([1, 0]), 2), ValueError, "rewards must be floating point"),
        ((t(1.0, math.inf), 2), ValueError, r"rewards\[1\] is inf"),
        ((t(-math.inf, 0.0), 2), ValueError, r"rewards\[0\] is -inf"),
        ((t(0.0, 0.0, 1e308, -1e308), 2), ValueError, r"group of rewards\[2\] overflow"),
    ],
)
def test_bad_input_is_named(arguments, error, message):
    with pytest.raises(error, match=message):
        group_advantages(*arguments)


@pytest.mark.bad_input
def test_other_bad_arguments():
    with pytest.raises(ValueError, match="scale is 'batch': must be 'group' or 'none'"):
        group_advantages(t(1.0, 0.0), 2, "batch")
    with pytest.raises(ValueError, match="prompts has 1 rows, rewards 2"):
        group_advantages(t(1.0, 0.0), 2, prompts="A")
    with pytest.raises(ValueError, match=r"prompts\[0\] has 3 rows: must be a multiple of"):
        group_advantages(t(1.0, 0.0, 1.0, 0.0), 2, prompts="ABAA")
    with pytest.raises(ValueError, match="G ≥ 2"):
        degenerate_groups(t(1.0), 1)
