"""5.3.2 Dr. GRPO: what the exercise's tests accept and reject."""

import math

import pytest
import torch

import exercises
from companion import losses

SOURCE = exercises.SOURCES / "5.3.2-dr-grpo.py"
LOSS_TESTS = {"test_value", "test_clip", "test_mask", "test_gradient"}


# The advantages.


def refusing(advantages):
    def checked(rewards, group_size):
        if group_size < 2:
            raise ValueError("G < 2")
        return advantages(rewards, group_size)

    return checked


def by_groups(of_group):
    """Advantages made group by group."""

    def advantages(rewards, group_size):
        return torch.cat([of_group(group) for group in rewards.split(group_size)])

    return refusing(advantages)


RIGHT_ADVANTAGES = {
    "group by group": by_groups(lambda r: r - r.sum() / len(r)),
    "from the leave-one-out mean": by_groups(
        lambda r: (r - (r.sum() - r) / (len(r) - 1)) * (len(r) - 1) / len(r)),
    "repeated means": refusing(
        lambda r, size: r - r.view(-1, size).mean(1).repeat_interleave(size)),
    "the package's": lambda r, size: losses.group_advantages(r, size, scale="none"),
}  # fmt: skip

# name -> (advantages, what the visible tests say about it)
WRONG_ADVANTAGES = {
    "over the std": (
        by_groups(lambda r: (r - r.mean()) / (r.std() + 1e-4)), "標準偏差で割っている"),
    "over the std alone": (
        by_groups(lambda r: (r - r.mean()) / r.std()), "標準偏差で割っている"),
    "mean of the batch": (refusing(lambda r, size: r - r.mean()), "全部の行の平均"),
    "leave-one-out": (
        by_groups(lambda r: r - (r.sum() - r) / (len(r) - 1)), "自分を除いた平均"),
    "turned around": (by_groups(lambda r: r.mean() - r), "引き算の向き"),
    "interleaved": (
        refusing(lambda r, size: (r.view(size, -1) - r.view(size, -1).mean(0)).flatten()),
        "行の並びが違う"),
    "G = 1 accepted": (
        lambda r, size: (r.view(-1, size) - r.view(-1, size).mean(1, True)).flatten(),
        "ValueError"),
    "not flat": (
        refusing(lambda r, size: r.view(-1, size) - r.view(-1, size).mean(1, True)), "形状"),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT_ADVANTAGES)
def test_right_advantages_pass(notebook, grade, name):
    assert grade(notebook, {"group_advantages": RIGHT_ADVANTAGES[name]}).failed == set()


@pytest.mark.parametrize("name", WRONG_ADVANTAGES)
def test_wrong_advantages_are_rejected(notebook, grade, name):
    advantages, hint = WRONG_ADVANTAGES[name]
    answers = {"group_advantages": advantages}
    assert grade(notebook, answers).failed == {"test_advantages"}
    assert hint in str(grade(notebook, answers, part="visible")["test_advantages"])


@pytest.mark.parametrize(
    "wrong",
    [
        refusing(lambda r, size: (r.view(-1, 4) - r.view(-1, 4).mean(1, True)).flatten()),
        by_groups(lambda r: (r - r.mean()).clamp(-1, 1)),
    ],
    ids=["G fixed", "clamped"],
)
def test_what_the_visible_tests_pass_the_hidden_ones_reject(notebook, grade, wrong):
    answers = {"group_advantages": wrong}
    assert grade(notebook, answers, part="visible").failed == set()
    assert grade(notebook, answers, part="hidden").failed == {"test_advantages"}


# The loss.


def log_ratios(logps, old, mask):
    return torch.where(mask.bool(), logps - old.detach(), 0.0)


def terms(logps, old, A, mask, epsilon):
    ratio, A = log_ratios(logps, old, mask).exp(), A.detach()[:, None]
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon)
    return torch.minimum(ratio * A, clipped * A) * mask


def by_rows(logps, old, A, mask, epsilon, L):
    total = logps.new_zeros(())
    for i, row in enumerate(mask.bool()):
        ratio, a = (logps[i][row] - old[i][row].detach()).exp(), A[i].detach()
        total = total + torch.min(ratio * a, ratio.clamp(1 - epsilon, 1 + epsilon) * a).sum()
    return -total / len(mask) / L


def by_sign(logps, old, A, mask, epsilon, L):
    """The clip as a bound on one side only: above where A > 0, below where A < 0."""
    ratio, a = log_ratios(logps, old, mask).exp(), A.detach()[:, None].expand_as(mask)
    bounded = torch.where(a > 0, ratio.clamp(max=1 + epsilon), ratio.clamp(min=1 - epsilon))
    return -(bounded * a * mask).sum() / (len(mask) * L)


RIGHT_LOSSES = {
    "row by row": by_rows,
    "clip on one side": by_sign,
    "mean of the rows": lambda x, o, A, m, e, L: -(terms(x, o, A, m, e).sum(1) / L).mean(),
    "mean over a row of the constant length": lambda x, o, A, m, e, L: (
        -terms(x, o, A, m, e).mean() * m.shape[1] / L),
    "the package's": losses.dr_grpo_loss,
}  # fmt: skip


def sums(x, o, A, m, e):
    return -terms(x, o, A, m, e).sum(1)


def unclipped(x, o, A, m):
    return log_ratios(x, o, m).exp() * A.detach()[:, None] * m


def always_clipped(x, o, A, m, e):
    return log_ratios(x, o, m).exp().clamp(1 - e, 1 + e) * A.detach()[:, None] * m


def with_max(x, o, A, m, e):
    """PPO's min turned to max where A < 0."""
    ratio, a = log_ratios(x, o, m).exp(), A.detach()[:, None]
    both = ratio * a, ratio.clamp(1 - e, 1 + e) * a
    return torch.where(a >= 0, torch.minimum(*both), torch.maximum(*both)) * m


def masked_after_exp(x, o, A, m, e, L):
    ratio, A = (x - o.detach()).exp() * m, A.detach()[:, None]
    return -torch.minimum(ratio * A, ratio.clamp(1 - e, 1 + e) * A).sum() / (len(m) * L)


def multiplied_by_the_mask(x, o, A, m, e, L):
    ratio, A = (x - o.detach()).exp(), A.detach()[:, None]
    return -(torch.minimum(ratio * A, ratio.clamp(1 - e, 1 + e) * A) * m).sum() / (len(m) * L)


def nan_in_the_gradient(x, o, A, m, e, L):
    ratio, A = (x - o.detach()).exp(), A.detach()[:, None]
    objective = torch.minimum(ratio * A, ratio.clamp(1 - e, 1 + e) * A)
    return -torch.where(m > 0, objective, 0.0).sum() / (len(m) * L)


def product_of_ratios(x, o, A, m, e, L):
    ratio, A = log_ratios(x, o, m).sum(1).exp(), A.detach()
    objective = torch.minimum(ratio * A, ratio.clamp(1 - e, 1 + e) * A) * m.sum(1)
    return -objective.sum() / (len(m) * L)


def through_old(x, o, A, m, e, L):
    ratio, A = torch.where(m > 0, x - o, 0.0).exp(), A.detach()[:, None]
    return -(torch.minimum(ratio * A, ratio.clamp(1 - e, 1 + e) * A) * m).sum() / (len(m) * L)


def through_advantages(x, o, A, m, e, L):
    ratio, A = log_ratios(x, o, m).exp(), A[:, None]
    return -(torch.minimum(ratio * A, ratio.clamp(1 - e, 1 + e) * A) * m).sum() / (len(m) * L)


# name -> (loss, the visible test that catches it, what it says)
WRONG_LOSSES = {
    "GRPO's mean over the response": (
        lambda x, o, A, m, e, L: (sums(x, o, A, m, e) / m.sum(1).clamp(min=1)).mean() / L,
        "test_value", "回答ごとに長さで割っている"),
    "GRPO": (
        lambda x, o, A, m, e, L: (sums(x, o, A, m, e) / m.sum(1).clamp(min=1)).mean(),
        "test_value", "回答ごとに長さで割っている"),
    "DAPO": (
        lambda x, o, A, m, e, L: sums(x, o, A, m, e).sum() / m.sum().clamp(min=1),
        "test_value", "トークンの数で割っている"),
    "over the padded width": (
        lambda x, o, A, m, e, L: (sums(x, o, A, m, e) / m.shape[1]).mean(),
        "test_value", "バッチの幅で割っている"),
    "not over L": (
        lambda x, o, A, m, e, L: sums(x, o, A, m, e).mean(),
        "test_value", "max_completion_length で割っていない"),
    "not over B": (
        lambda x, o, A, m, e, L: sums(x, o, A, m, e).sum() / L,
        "test_value", "B で割っていない"),
    "sign": (
        lambda x, o, A, m, e, L: -sums(x, o, A, m, e).mean() / L, "test_value", "符号が逆"),
    "not clipped": (
        lambda x, o, A, m, e, L: -unclipped(x, o, A, m).sum() / (len(m) * L),
        "test_clip", "クリップされていない"),
    "always clipped": (
        lambda x, o, A, m, e, L: -always_clipped(x, o, A, m, e).sum() / (len(m) * L),
        "test_clip", "いつもクリップ"),
    "min or max by the sign of A": (
        lambda x, o, A, m, e, L: -with_max(x, o, A, m, e).sum() / (len(m) * L),
        "test_clip", "いつもクリップ"),
    "epsilon fixed": (
        lambda x, o, A, m, e, L: sums(x, o, A, m, 0.2).mean() / L, None, ""),
    "product of the ratios": (product_of_ratios, "test_gradient", "勾配は"),
    "masked after exp": (masked_after_exp, "test_mask", "NaN"),
    "multiplied by the mask": (multiplied_by_the_mask, "test_mask", "NaN"),
    "NaN in the gradient only": (nan_in_the_gradient, None, ""),
    "over the number of rows with a token": (
        lambda x, o, A, m, e, L: sums(x, o, A, m, e).sum() / (m.any(1).sum() * L),
        "test_mask", "損失は 0"),
    "gradient through the old log-probs": (through_old, "test_gradient", "古い対数確率に勾配"),
    "gradient through the advantages": (
        through_advantages, "test_gradient", "アドバンテージに勾配"),
    "policy detached": (
        lambda x, o, A, m, e, L: sums(x.detach(), o, A, m, e).mean() / L,
        "test_gradient", "does not require grad"),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT_LOSSES)
def test_right_losses_pass(notebook, grade, name):
    assert grade(notebook, {"dr_grpo_loss": RIGHT_LOSSES[name]}).failed == set()


@pytest.mark.parametrize("name", WRONG_LOSSES)
def test_wrong_losses_are_rejected(notebook, grade, name):
    loss, caught_by, hint = WRONG_LOSSES[name]
    answers = {"dr_grpo_loss": loss}
    assert grade(notebook, answers, part="hidden").failed & LOSS_TESTS
    visible = grade(notebook, answers, part="visible")
    if caught_by is None:
        assert visible.failed == set()
    else:
        assert hint in str(visible[caught_by])


# The planted bug.


def test_exactly_one_identity_fails_for_the_planted_bug(notebook):
    names = {}
    for cell in notebook.cells:
        if cell.id in ("imports", "batches", "buggy_loss", "show_identities", "dr_grpo_loss"):
            exec(cell.source, names)

    def off(loss, extra):
        return [abs(left - right) > 1e-6 for _, left, right in names["identities"](loss, extra)]

    assert off(names["buggy_loss"], 0) == [False, False, False]
    for extra in (1, 4, 20):
        assert off(names["buggy_loss"], extra) == [False, True, False]
        assert off(names["dr_grpo_loss"], extra) == [False, False, False]


@pytest.mark.parametrize(
    "number, left", [(1, 0.0461), (3, 0.0461), (2, 0.0768), (2, 0.1537), (2, math.nan)]
)
def test_a_wrong_diagnosis_is_rejected(notebook, grade, number, left):
    answer = dict(failed_identity=number, left_side=left)
    assert grade(notebook, {"failed_identity": answer}).failed == {"test_failed_identity"}


def test_a_diagnosis_read_off_the_table_passes(notebook, grade):
    answer = dict(failed_identity=2, left_side=0.0461)
    assert grade(notebook, {"failed_identity": answer}).failed == set()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x, o, A, m, e, L: sums(x, o, A, m, e).mean() / m.shape[1],
        lambda x, o, A, m, e, L: sums(x, o, A, m, e).mean() / m.any(0).sum(),
        lambda x, o, A, m, e, L: sums(x, o, A, m, e).mean(),
        lambda x, o, A, m, e, L: sums(x, o, A, m, e).sum() / L,
        lambda x, o, A, m, e, L: sums(x, o, A, m, e).sum() / m.sum(),
        lambda x, o, A, m, e, L: (sums(x, o, A, m, e) / m.sum(1)).mean(),
        lambda x, o, A, m, e, L: -unclipped(x, o, A, m).sum() / (len(m) * L),
    ],
    ids=["unchanged", "longest response", "no L", "no B", "token mean", "GRPO", "not clipped"],
)
def test_a_wrong_repair_is_rejected(notebook, grade, wrong):
    assert grade(notebook, {"repaired_loss": wrong}).failed == {"test_repaired"}


# Predicted, then measured.


@pytest.mark.parametrize(
    "factor, angle, wrong",
    [
        (0.8, 0.0, set()),
        (4 / 5, 0, set()),
        (torch.tensor(0.8), torch.tensor(0.0), set()),
        (1.0, 0.0, {"test_predicted_factor"}),
        (0.2, 0.0, {"test_predicted_factor"}),
        (1.25, 0.0, {"test_predicted_factor"}),
        (0.8, 21.2, {"test_predicted_angle"}),
        (0.8, 90.0, {"test_predicted_angle"}),
    ],
)
def test_predictions(notebook, grade, factor, angle, wrong):
    answer = dict(predicted_factor=factor, predicted_angle=angle)
    assert grade(notebook, {"predictions": answer}).failed == wrong


def enumerate_by(weights):
    """An expected_gradient whose group has the advantages ``weights(r, n, scale, per_token)``."""

    def expected_gradient(probs, rewards, lengths, G, scale=False, per_token=False):
        pi, r, n = (torch.tensor(x, dtype=torch.float64) for x in (probs, rewards, lengths))
        total = torch.zeros_like(pi)
        for group in torch.cartesian_prod(*[torch.arange(len(pi))] * G):
            A = weights(r[group], n[group], scale, per_token)
            scores = torch.eye(len(pi)).double()[group] - pi
            total += pi[group].prod() * (A[:, None] * scores).mean(0)
        return total

    return expected_gradient


def advantages(r, n, scale, per_token):
    A = r - r.mean()
    if scale:
        A = A / (r.std() + 1e-4)
    return A / n if per_token else A


def test_a_right_enumeration_passes(notebook, grade):
    assert grade(notebook, {"expected_gradient": enumerate_by(advantages)}).failed == set()


def uniform(probs, rewards, lengths, G, **switches):
    """All groups weigh the same."""
    return enumerate_by(advantages)((1 / len(probs),) * len(probs), rewards, lengths, G, **switches)


@pytest.mark.parametrize(
    "wrong",
    [
        enumerate_by(lambda r, n, scale, token: len(r) * advantages(r, n, scale, token)),
        enumerate_by(lambda r, n, scale, token: advantages(r, n, False, token)),
        enumerate_by(lambda r, n, scale, token: advantages(r, n, scale, False)),
        enumerate_by(
            lambda r, n, scale, token: (r - r.mean())
            / (r.std(correction=0) + 1e-4 if scale else 1.0) / (n if token else 1.0)),
        enumerate_by(lambda r, n, scale, token: r / (n if token else 1.0)),
        enumerate_by(
            lambda r, n, scale, token: len(r) / (len(r) - 1) * advantages(r, n, scale, token)),
        enumerate_by(
            lambda r, n, scale, token: advantages(r, n, scale, False) / (n.mean() if token else 1)),
        uniform,
    ],
    ids=["not over G", "no std", "no length", "std over G", "no baseline", "leave-one-out",
         "mean length", "uniform groups"],
)  # fmt: skip
def test_wrong_enumerations_are_rejected(notebook, grade, wrong):
    assert grade(notebook, {"expected_gradient": wrong}).failed == {"test_expected_gradient"}
