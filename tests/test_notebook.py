"""companion.notebook: a claim shows both sides and fails when it should."""

import numpy as np
import pytest
import torch

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
    assert capsys.readouterr().out == "✓ 差は広がる   0.1 → 0.8\n✓ 単独\n"
    with pytest.raises(AssertionError, match="差は広がる.*0.8 → 0.1"):
        check("差は広がる", torch.tensor(False), "0.8 → 0.1")


def test_check_refuses_more_than_one_truth_value():
    with pytest.raises(ValueError, match="condition"):
        check("どれ？", torch.tensor([True, False]))


def test_setup_prints_one_line_without_path_or_time_and_seeds(capsys):
    setup(seed=3)
    first = torch.rand(2), np.random.rand()
    line = capsys.readouterr().out
    setup(seed=3)
    assert torch.equal(first[0], torch.rand(2)) and first[1] == np.random.rand()
    assert capsys.readouterr().out == line
    assert line.count("\n") == 1 and "/" not in line
    assert all(version in line for version in versions().values())
    assert torch.get_num_threads() == 1


def test_versions_are_the_installed_releases_without_local_parts():
    found = versions()
    assert list(found) == ["Python", "torch", "transformers", "trl"]
    assert not any("+" in version for version in found.values())
