"""4.5.4.2 IPO: what the exercise's tests accept and reject."""

import math

import pytest
import torch

import exercises
from companion import losses

SOURCE = exercises.SOURCES / "4.5.4.2-ipo.py"
LOSS_TESTS = {"test_value", "test_batch", "test_lengths", "test_gradient"}


def closed_form(win, ref_probs, beta):
    odds = ref_probs[0] / ref_probs[1] * math.exp((2 * win - 1) / (2 * beta))
    return torch.tensor([odds, 1.0], dtype=torch.float64) / (1 + odds)


# In the place of question 3's training, where another question is at stake.
QUICK = {"trained_policy": closed_form}


def written(of_scores, score=lambda logps, ref, n: (logps - ref.detach()) / n):
    """A loss from what it does with the scores of both sides, and how it makes a score."""

    def loss(c, r, ref_c, ref_r, beta, n_w=None, n_l=None):
        n_w, n_l = (1 if n is None else n for n in (n_w, n_l))
        return of_scores(score(c, ref_c, n_w), score(r, ref_r, n_l), beta)

    return loss


def square(u, v, beta):
    return ((u - v - 1 / (2 * beta)) ** 2).mean()


def expanded(u, v, beta):
    delta = u - v
    return (delta**2 - delta / beta).mean() + 1 / (4 * beta**2)


def by_loop(c, r, ref_c, ref_r, beta, n_w=None, n_l=None):
    total = 0.0
    for i in range(len(c)):
        u, v = c[i] - ref_c[i].detach(), r[i] - ref_r[i].detach()
        if n_w is not None:
            u, v = u / n_w[i], v / n_l[i]
        total = total + (u - v - 0.5 / beta) ** 2
    return total / len(c)


RIGHT = {
    "square": written(square),
    "expanded": written(expanded),
    "mse": written(lambda u, v, beta: torch.nn.functional.mse_loss(
        u - v, torch.full_like(u, 1 / (2 * beta)))),
    "loop": by_loop,
    "the package's": losses.ipo_loss,
}


def both_lengths_added(c, r, ref_c, ref_r, beta, n_w=None, n_l=None):
    n = 1 if n_w is None else n_w + n_l
    return square((c - ref_c.detach()) / n, (r - ref_r.detach()) / n, beta)


def lengths_swapped(c, r, ref_c, ref_r, beta, n_w=None, n_l=None):
    return RIGHT["square"](c, r, ref_c, ref_r, beta, n_l, n_w)


def chosen_length_only(c, r, ref_c, ref_r, beta, n_w=None, n_l=None):
    return RIGHT["square"](c, r, ref_c, ref_r, beta, n_w, n_w)


# name -> (loss, the graded cells that reject it)
WRONG = {
    "sum in place of the token mean": (
        written(square, lambda logps, ref, n: logps - ref.detach()),
        {"test_lengths", "test_gradient"}),
    "token mean of the policy only": (
        written(square, lambda logps, ref, n: logps / n - ref.detach()),
        {"test_lengths", "test_gradient"}),
    "lengths added": (both_lengths_added, {"test_lengths", "test_gradient"}),
    "lengths swapped": (lengths_swapped, {"test_lengths", "test_gradient"}),
    "one length for both": (chosen_length_only, {"test_lengths", "test_gradient"}),
    "1/β": (written(lambda u, v, beta: ((u - v - 1 / beta) ** 2).mean()), LOSS_TESTS),
    "β as target": (written(lambda u, v, beta: ((u - v - beta) ** 2).mean()), LOSS_TESTS),
    "β/2": (written(lambda u, v, beta: ((u - v - beta / 2) ** 2).mean()), LOSS_TESTS),
    "βΔ": (written(lambda u, v, beta: ((beta * (u - v) - 1 / (2 * beta)) ** 2).mean()),
           LOSS_TESTS),
    "no reference": (written(square, lambda logps, ref, n: logps / n), LOSS_TESTS),
    "reference added": (
        written(square, lambda logps, ref, n: (logps + ref.detach()) / n), LOSS_TESTS),
    "swapped pair": (written(lambda u, v, beta: square(v, u, beta)), LOSS_TESTS),
    "absolute value": (
        written(lambda u, v, beta: (u - v - 1 / (2 * beta)).abs().mean()), LOSS_TESTS),
    "half the square": (written(lambda u, v, beta: square(u, v, beta) / 2), LOSS_TESTS),
    "sign of the loss": (written(lambda u, v, beta: -square(u, v, beta)), LOSS_TESTS),
    "sum over the batch": (
        written(lambda u, v, beta: ((u - v - 1 / (2 * beta)) ** 2).sum()),
        {"test_batch", "test_lengths", "test_gradient"}),
    "mean before the square": (
        written(lambda u, v, beta: (u - v - 1 / (2 * beta)).mean() ** 2),
        {"test_batch", "test_lengths", "test_gradient"}),
    "clamped gap": (
        written(lambda u, v, beta: ((u - v).clamp(-20, 20) - 1 / (2 * beta)).pow(2).mean()),
        {"test_value"}),
    "one-sided": (
        written(lambda u, v, beta: (1 / (2 * beta) - (u - v)).clamp(min=0).pow(2).mean()),
        LOSS_TESTS),
    "no mean": (written(lambda u, v, beta: (u - v - 1 / (2 * beta)) ** 2), LOSS_TESTS),
    "reference not detached": (
        written(square, lambda logps, ref, n: (logps - ref) / n), {"test_gradient"}),
    "policy detached": (
        written(square, lambda logps, ref, n: (logps.detach() - ref) / n), {"test_gradient"}),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_right_losses_pass_everything(notebook, grade, name):
    results = grade(notebook, {"ipo_loss": RIGHT[name], **QUICK})
    assert results.failed == set(), results


@pytest.mark.parametrize("name", WRONG)
def test_wrong_losses_are_rejected(notebook, grade, name):
    loss, where = WRONG[name]
    answers = {"ipo_loss": loss, **QUICK}
    assert grade(notebook, answers).failed & where
    assert grade(notebook, answers).failed <= LOSS_TESTS
    assert grade(notebook, answers, part="hidden").failed & where


@pytest.mark.parametrize(
    "name, hint",
    [
        ("sum in place of the token mean", "長さで割られていない"),
        ("lengths added", "長さの和"),
        ("one length for both", "片方の長さ"),
        ("1/β", "1/β になっている"),
        ("β as target", "目標が β に"),
        ("β/2", "β/2"),
        ("βΔ", "Δ に β が掛かっている"),
        ("swapped pair", "入れ替わっている"),
        ("absolute value", "絶対値"),
        ("half the square", "半分"),
        ("sign of the loss", "符号が逆"),
        ("sum over the batch", "合計"),
        ("mean before the square", "順序が逆"),
        ("no mean", "スカラー"),
        ("reference not detached", "参照方策に勾配"),
    ],
)
def test_the_visible_tests_say_what_is_wrong(notebook, grade, name, hint):
    results = grade(notebook, {"ipo_loss": WRONG[name][0], **QUICK}, part="visible")
    messages = [str(error) for error in results.values() if error is not None]
    assert any(hint in message for message in messages), messages


def test_exactly_one_identity_fails_for_the_planted_bug(notebook):
    names = {}
    for cell in notebook.cells:
        if cell.id in ("imports", "buggy_ipo_loss", "show_identities", "ipo_loss"):
            exec(cell.source, names)
    for beta in (0.1, 0.4, 2.5):
        for loss, expected in (("buggy_ipo_loss", [1, 0, 1]), ("ipo_loss", [1, 1, 1])):
            pairs = names["identities"](names[loss], beta)
            assert [abs(left - right) < 1e-9 for _, left, right in pairs] == expected


@pytest.mark.parametrize(
    "failed_identity, ratio",
    [(1, 0.4), (3, 0.4), (2, 0.1), (2, 2.5), (2, 0.16), ("2", 0.4), (2, math.nan)],
)
def test_a_wrong_diagnosis_is_rejected(notebook, grade, failed_identity, ratio):
    answer = dict(failed_identity=failed_identity, ratio=ratio)
    results = grade(notebook, {"failed_identity": answer, **QUICK})
    assert results.failed == {"test_failed_identity"}


@pytest.mark.parametrize(
    "name", ["βΔ", "1/β", "swapped pair", "absolute value", "sum over the batch", "clamped gap"]
)
def test_a_wrong_repair_is_rejected(notebook, grade, name):
    results = grade(notebook, {"repaired_ipo_loss": WRONG[name][0], **QUICK})
    assert results.failed == {"test_repaired"}


@pytest.mark.parametrize(
    "gap, prob, wrong",
    [
        (1.5, 0.53, set()),
        (torch.tensor(1.5), 0.5284, set()),
        (2.5, 0.53, {"test_predicted_gap"}),
        (3.0, 0.53, {"test_predicted_gap"}),
        (6.931, 0.53, {"test_predicted_gap"}),
        (-1.5, 0.53, {"test_predicted_gap"}),
        (1.5, 0.8, {"test_predicted_prob"}),
        (1.5, 0.8176, {"test_predicted_prob"}),
        (1.5, 0.2, {"test_predicted_prob"}),
        (1.5, 53.0, {"test_predicted_prob"}),
    ],
)
def test_predictions(notebook, grade, gap, prob, wrong):
    answers = {"predictions": dict(predicted_gap=gap, predicted_prob=prob), **QUICK}
    assert grade(notebook, answers).failed == wrong


@pytest.mark.parametrize(
    "win_of, right",
    [(lambda win: win, True), (lambda win: 1.0, False), (lambda win: 1 - win, False)],
    ids=["right", "A always wins", "labels swapped"],
)
def test_trainings(notebook, grade, win_of, right):
    def trained_policy(win, ref_probs, beta):
        return closed_form(win_of(win), ref_probs, beta)

    results = grade(notebook, {"trained_policy": trained_policy})
    assert results.failed == (set() if right else {"test_trained_policy"})
