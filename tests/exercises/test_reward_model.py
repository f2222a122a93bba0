"""4.4.2 reward model: what the exercise's tests accept and reject."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F

import exercises
from companion import losses

SOURCE = exercises.SOURCES / "4.4.2-reward-model.py"
LOSS_TESTS = {"test_value", "test_batch", "test_gradient", "test_stability"}


def fitted(loss_of, steps=500):
    """A trained_rewards that descends on loss_of(margins r_i - r_j, wins as a tensor)."""

    def trained_rewards(wins):
        wins = torch.tensor(wins, dtype=torch.float64)
        rewards = torch.zeros(len(wins), dtype=torch.float64, requires_grad=True)
        for _ in range(steps):
            loss = loss_of(rewards[:, None] - rewards[None, :], wins)
            (gradient,) = torch.autograd.grad(loss, rewards)
            rewards = (rewards - 2.0 * gradient).detach().requires_grad_()
        return rewards.detach()

    return trained_rewards


def likelihood(margins, wins):
    return -(wins * F.logsigmoid(margins)).sum() / wins.sum()


@functools.cache
def once(wins):
    return fitted(likelihood)(wins)


# In the place of question 3's training, where another question is at stake.
QUICK = {"trained_rewards": lambda wins: once(tuple(map(tuple, wins)))}

RIGHT = {
    "logsigmoid": lambda w, y: -F.logsigmoid(w - y).mean(),
    "softplus": lambda w, y: F.softplus(y - w).mean(),
    "logaddexp": lambda w, y: torch.logaddexp(torch.zeros_like(w), y - w).mean(),
    "cross entropy": lambda w, y: F.binary_cross_entropy_with_logits(w - y, torch.ones_like(w)),
    "two-way softmax": lambda w, y: -torch.stack([w, y]).log_softmax(0)[0].mean(),
    "the package's": losses.reward_model_loss,
}

# name -> (loss, what the visible tests say about it)
WRONG = {
    "sign of the loss": (lambda w, y: F.logsigmoid(w - y).mean(), "符号が逆"),
    "swapped pair": (lambda w, y: -F.logsigmoid(y - w).mean(), "入れ替わっている"),
    "sum of the scores": (lambda w, y: -F.logsigmoid(w + y).mean(), "足している"),
    "no logarithm": (lambda w, y: -torch.sigmoid(w - y).mean(), "σ の対数"),
    "1 - sigma": (lambda w, y: (1 - torch.sigmoid(w - y)).mean(), "σ の対数"),
    "no sigma": (lambda w, y: -(w - y).mean(), "σ を通して"),
    "sigma before the difference": (
        lambda w, y: -(torch.sigmoid(w) - torch.sigmoid(y)).mean(), "差をとるのが先"),
    "the chosen alone": (lambda w, y: -F.logsigmoid(w).mean(), "使われていない"),
    "hinge": (lambda w, y: F.relu(1 - (w - y)).mean(), "見比べて"),
    "a temperature": (lambda w, y: -F.logsigmoid((w - y) / 2).mean(), "見比べて"),
    "centred": (
        lambda w, y: (-F.logsigmoid(w - y) + 0.01 * (w + y) ** 2).mean(), "見比べて"),
    "label smoothing": (
        lambda w, y: -(0.9 * F.logsigmoid(w - y) + 0.1 * F.logsigmoid(y - w)).mean(), "見比べて"),
    "no mean": (lambda w, y: -F.logsigmoid(w - y), "スカラー"),
    "sum over the batch": (lambda w, y: -F.logsigmoid(w - y).sum(), "合計"),
    "mean before the logarithm": (lambda w, y: -F.logsigmoid((w - y).mean()), "順序が逆"),
    "all pairs of the batch": (
        lambda w, y: -F.logsigmoid(w[:, None] - y[None, :]).mean(), "勾配が違います"),
    "log of sigmoid": (lambda w, y: -torch.sigmoid(w - y).log().mean(), "まとめて計算"),
    "log of 1 + exp": (lambda w, y: (1 + (y - w).exp()).log().mean(), "まとめて計算"),
    "clamped sigmoid": (
        lambda w, y: -torch.sigmoid(w - y).clamp(min=1e-12).log().mean(), "ほぼ 1000"),
    "clamped margin": (
        lambda w, y: -F.logsigmoid((w - y).clamp(-50, 50)).mean(), "ほぼ 1000"),
    "rejected detached": (
        lambda w, y: -F.logsigmoid(w - y.detach()).mean(), "好まれなかった側に勾配"),
    "chosen detached": (lambda w, y: -F.logsigmoid(w.detach() - y).mean(), "好まれた側に勾配"),
    "not differentiable": (
        lambda w, y: torch.tensor(-F.logsigmoid(w - y).mean().item()), "does not require grad"),
    "a Python number": (lambda w, y: -F.logsigmoid(w - y).mean().item(), "テンソル"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_losses_pass_in_any_form(notebook, grade, name):
    answers = {"reward_model_loss": RIGHT[name], **QUICK}
    assert grade(notebook, answers).failed == set()


@pytest.mark.parametrize("name", [n for n in WRONG if n != "all pairs of the batch"])
def test_wrong_losses_are_rejected_with_a_hint_and_by_hidden_tests_alone(notebook, grade, name):
    wrong, hint = WRONG[name]
    answers = {"reward_model_loss": wrong, **QUICK}
    visible = grade(notebook, answers, part="visible")
    messages = [str(error) for error in visible.values() if error is not None]
    assert any(hint in message for message in messages), messages
    assert visible.failed <= LOSS_TESTS
    assert grade(notebook, answers, part="hidden").failed & LOSS_TESTS


def test_pairs_across_the_batch_are_rejected(notebook, grade):
    answers = {"reward_model_loss": WRONG["all pairs of the batch"][0], **QUICK}
    assert "test_batch" in grade(notebook, answers, part="hidden").failed


def by_rows(scores, mask):
    return torch.stack([row[keep != 0][-1] for row, keep in zip(scores, mask, strict=True)])


def from_the_right(scores, mask):
    last = mask.shape[1] - 1 - mask.flip(-1).argmax(-1)
    return scores[torch.arange(len(scores)), last]


@pytest.mark.parametrize("right", [by_rows, from_the_right])
def test_right_readings_pass(notebook, grade, right):
    assert grade(notebook, {"last_scores": right, **QUICK}).failed == set()


@pytest.mark.parametrize(
    "wrong, hint",
    [
        (lambda s, m: s[:, -1], "パディングの位置"),
        (lambda s, m: s.gather(-1, m.sum(-1, keepdim=True) - 1).squeeze(-1), "左に"),
        (lambda s, m: s.gather(-1, (m.sum(-1, keepdim=True) - 2).clamp(min=0)).squeeze(-1),
         "1 つ手前"),
        (lambda s, m: (s * m).sum(-1), "合計"),
        (lambda s, m: (s * m).sum(-1) / m.sum(-1), "平均"),
        (lambda s, m: s[:, 0], "最初の"),
        (lambda s, m: by_rows(s, m)[:, None], "形状"),
    ],
    ids=["last column", "by count", "one early", "sum", "mean", "first", "shape"],
)
def test_wrong_readings_are_rejected(notebook, grade, wrong, hint):
    results = grade(notebook, {"last_scores": wrong, **QUICK})
    assert results.failed == {"test_last_scores"}
    assert hint in str(results["test_last_scores"])
    hidden = grade(notebook, {"last_scores": wrong, **QUICK}, part="hidden")
    # a column too many is seen by the visible test only
    assert hidden.failed == (set() if hint == "形状" else {"test_last_scores"})


def test_exactly_one_identity_fails_for_the_planted_bug(notebook):
    names = {}
    for cell in notebook.cells:
        if cell.id in ("imports", "buggy_loss", "show_identities", "reward_model_loss"):
            exec(cell.source, names)
    for shift in (-7.0, 1.0, 3.5):
        off = [abs(left - right) > 1e-6
               for _, left, right in names["identities"](names["buggy_loss"], shift)]
        assert off == [False, False, True]
        assert all(abs(left - right) < 1e-12
                   for _, left, right in names["identities"](names["reward_model_loss"], shift))


@pytest.mark.parametrize(
    "answer",
    [dict(failed_identity=1, left_side=0.3133), dict(failed_identity=2, left_side=0.3133),
     dict(failed_identity=3, left_side=0.1269), dict(failed_identity=3, left_side=0.1942),
     dict(failed_identity="3", left_side=0.3133), dict(failed_identity=3, left_side=math.nan)],
)
def test_a_wrong_diagnosis_is_rejected(notebook, grade, answer):
    results = grade(notebook, {"failed_identity": answer, **QUICK})
    assert results.failed == {"test_failed_identity"}


def unchanged(w, y):
    return -torch.sigmoid((w - y) / (1 + (w + y).abs() / 10)).log().mean()


@pytest.mark.parametrize(
    "wrong",
    [
        unchanged,
        lambda w, y: -F.logsigmoid((w - y) / 1.3).mean(),
        lambda w, y: -F.logsigmoid((w - y) / (1 + (w - y).abs() / 10)).mean(),
        lambda w, y: -F.logsigmoid(y - w).mean(),
        lambda w, y: -F.logsigmoid(w - y).sum(),
    ],
    ids=["unchanged", "scale written in", "scaled by the difference", "swapped", "sum"],
)
def test_a_wrong_repair_is_rejected(notebook, grade, wrong):
    results = grade(notebook, {"repaired_loss": wrong, **QUICK})
    assert results.failed == {"test_repaired"}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_repair_passes_in_any_form(notebook, grade, name):
    answers = {"repaired_loss": RIGHT[name], **QUICK}
    assert grade(notebook, answers).failed == set()


@pytest.mark.parametrize(
    "gap, prob, right",
    [
        (math.log(4), 0.8, True),
        (1.386, 0.8, True),
        (torch.tensor(1.3863), torch.tensor(0.8), True),
        (0.8, 0.8, False),
        (math.log(0.8), 0.8, False),
        (2.0, 0.8, False),
        (math.log(4), 0.5, False),
        (math.log(4), 0.65, False),
        (math.log(4), 80.0, False),
    ],
)
def test_predictions(notebook, grade, gap, prob, right):
    answers = {"predictions": dict(predicted_gap=gap, predicted_prob=prob), **QUICK}
    assert grade(notebook, answers).failed == (set() if right else {"test_predictions"})


@pytest.mark.parametrize(
    "wrong",
    [
        lambda margins, wins: likelihood(margins, wins * (wins > wins.T)),
        lambda margins, wins: likelihood(margins, wins.T),
        lambda margins, wins: likelihood(margins, (wins > 0).double()),
        lambda margins, wins: likelihood(2 * margins, wins),
        lambda margins, wins: likelihood(margins, wins) + 0.1 * (margins**2).mean(),
    ],
    ids=["winners only", "swapped", "each pair once", "twice the margin", "shrunk"],
)
def test_wrong_trainings_are_rejected(notebook, grade, wrong):
    results = grade(notebook, {"trained_rewards": fitted(wrong)})
    assert results.failed == {"test_trained_rewards"}


def test_a_right_training_passes_in_another_form(notebook, grade):
    assert grade(notebook, {"trained_rewards": fitted(likelihood)}).failed == set()
