"""companion.notebook: a claim shows both sides and fails when it should."""

import os
import random
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch
import transformers

from companion.notebook import check, claim, setup, versions


def test_claim_prints_both_sides_of_a_number(capsys):
    claim("J(π*) = β E[log Z]", 0.1234567, torch.tensor(0.1234567, dtype=torch.float64))
    assert capsys.readouterr().out == (
        "✓ J(π*) = β E[log Z]   左辺 = 0.123457   右辺 = 0.123457   最大差 0e+00\n")


def test_claim_shows_few_values_and_the_first_of_many(capsys):
    claim("few", [1.0, 2.0], [1.0, 2.0])
    claim("many", np.zeros((3, 5)), np.full((3, 5), 3e-13))
    few, many = capsys.readouterr().out.splitlines()
    assert few == "✓ few   左辺 = (1, 2)   右辺 = (1, 2)   最大差 0e+00"
    assert many == "✓ many   左辺 = 0, … (3×5 個)   右辺 = 3e-13, … (3×5 個)   最大差 3e-13"


def test_claim_takes_tensors_with_gradients_lists_of_them_and_broadcasts():
    leaf = torch.tensor(2.0, requires_grad=True)
    claim("leaf", leaf * 2, 4)
    claim("list", [leaf, leaf + 1], [2, 3])
    claim("list of numbers too", [leaf, 3.0, np.float32(4)], (2, 3, 4))
    claim("nested", [[leaf], [leaf + 1]], [[2.0], [3.0]])
    claim("bfloat16", torch.tensor([0.5, 2.0], dtype=torch.bfloat16), [0.5, 2.0])
    claim("one side for all", torch.ones(4, 3), 1.0)
    claim("float32 against float64", torch.tensor(0.5), torch.tensor(0.5, dtype=torch.float64))


@pytest.mark.parametrize("left, right, place", [
    ([1.0, 2.0, 3.0], [1.0, 2.5, 9.0], r"位置 \(1,\)"),
    (np.zeros((2, 3)), np.eye(2, 3), r"位置 \(0, 0\)"),
    (1.0, 1.0 + 1e-9, "差 1.0e-09 が許容差 1e-10"),
    (float("nan"), float("nan"), "nan"),
    ([0.0, float("nan")], [0.0, 0.0], r"位置 \(1,\)"),
    (float("inf"), 1.0, "inf"),
    (float("inf"), float("-inf"), "inf"),
    (np.zeros(3), np.zeros(4), "形状"),
])  # fmt: skip
def test_claim_fails_with_its_name_and_the_first_bad_position(capsys, left, right, place):
    with pytest.raises(AssertionError, match=place) as caught:
        claim("名前", left, right)
    assert "名前" in str(caught.value)
    assert not capsys.readouterr().out


def test_claim_takes_equal_infinities_in_silence():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        claim("∞", [float("inf"), -float("inf")], [float("inf"), -float("inf")])
        claim("−log 0", -torch.zeros(()).log(), float("inf"))


@pytest.mark.bad_input
@pytest.mark.parametrize("left, right, message", [
    (1 + 2j, 1 + 3j, "名前: left must be real numbers.*not complex"),
    (torch.tensor(1j), 0, "left must be .* not complex64"),
    (1.0, "1.0", "right must be .* not <U3"),
    ([1.0, "1.0"], [1.0, 1.0], r"left\[1\] must be .* not <U3"),
    (1.0, 10**400, "right must be .* not int"),
    (Fraction(1, 3), 1 / 3, "left must be .* not Fraction"),
    (None, None, "left must be .* not NoneType"),
])  # fmt: skip
def test_claim_is_about_real_numbers(capsys, left, right, message):
    with pytest.raises(TypeError, match=message):
        claim("名前", left, right)
    assert not capsys.readouterr().out


def test_claim_names_a_list_that_is_no_array():
    with pytest.raises(ValueError, match=r"right has items of different shapes: \[\(\), \(2,\)\]"):
        claim("名前", 1.0, [torch.ones(2), 1.0])


def test_claim_tolerance_is_absolute_and_can_be_widened():
    claim("wide", 1.0, 1.05, tol=0.1)
    with pytest.raises(AssertionError):
        claim("narrow", 1e6, 1e6 + 1e-3)


def test_claim_about_nothing_is_refused():
    with pytest.raises(ValueError, match="empty"):
        claim("nothing", [], [])


def test_check_prints_its_numbers_or_fails_with_them(capsys):
    check("差は広がる", torch.tensor(True), "0.1 → 0.8")
    check("単独", np.bool_(True))
    check("Python", True)
    check("要素は一つ", torch.tensor([[True]]))
    assert capsys.readouterr().out == (
        "✓ 差は広がる   0.1 → 0.8\n✓ 単独\n✓ Python\n✓ 要素は一つ\n")
    with pytest.raises(AssertionError, match="差は広がる.*0.8 → 0.1"):
        check("差は広がる", torch.tensor(False), "0.8 → 0.1")


@pytest.mark.bad_input
@pytest.mark.parametrize("condition", [
    torch.tensor([True, False]), np.array([True, True]), [True], None, "はい",
    float("nan"), 0.3, 1, np.float64(0.3), torch.tensor(float("nan")),
    torch.tensor(1.0, dtype=torch.bfloat16),
])  # fmt: skip
def test_check_refuses_what_is_not_one_truth_value(condition):
    with pytest.raises(ValueError, match="どれ？: condition must be one truth value"):
        check("どれ？", condition)


def test_setup_prints_one_line_without_path_or_time_and_seeds(capsys):
    def draws():
        return torch.rand(()).item(), np.random.rand(), random.random()

    torch.set_num_threads(2)
    setup(seed=3)
    first = draws()
    line = capsys.readouterr().out
    setup(seed=4)
    assert all(a != b for a, b in zip(first, draws(), strict=True))
    capsys.readouterr()
    setup(seed=3)
    assert draws() == first
    assert capsys.readouterr().out == line
    assert line.count("\n") == 1 and "/" not in line
    assert all(version in line for version in versions().values())
    assert torch.get_num_threads() == 1


def test_setup_silences_libraries_and_keeps_off_the_hub(monkeypatch):
    transformers.utils.logging.set_verbosity_warning()
    monkeypatch.delenv("HF_HUB_OFFLINE")
    setup()
    assert transformers.utils.logging.get_verbosity() == transformers.utils.logging.ERROR
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # a reader's own choice
    setup()
    assert os.environ["HF_HUB_OFFLINE"] == "0"


def test_versions_are_the_installed_releases_without_local_parts():
    found = versions()
    assert list(found) == ["Python", "torch", "transformers", "trl"]
    assert not any("+" in version for version in found.values())
