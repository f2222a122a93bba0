"""4.5.4.3 KTO: what the exercise's tests accept and reject."""

import functools
import math

import pytest
import torch

import exercises
from companion import losses

SOURCE = exercises.SOURCES / "4.5.4.3-kto.py"
LOSS_TESTS = {"test_value", "test_batch", "test_gradient"}


def gain(logps, ref_logps, point, beta):
    return beta * (logps - ref_logps.detach() - point.detach())


def mean_loss(a, desirable, w_plus, w_minus):
    signed = torch.where(desirable, a, -a)
    weights = torch.where(desirable, w_plus, w_minus)
    return (weights * (1 - torch.sigmoid(signed))).mean()


def by_rows(logps, ref_logps, desirable, point, beta, w_plus=1.0, w_minus=1.0):
    total = 0.0
    for i, good in enumerate(desirable.tolist()):
        a = beta * (logps[i] - ref_logps[i].detach() - point.detach())
        total = total + (w_plus * torch.sigmoid(-a) if good else w_minus * torch.sigmoid(a))
    return total / len(desirable)


def concatenated(logps, ref_logps, desirable, point, beta, w_plus=1.0, w_minus=1.0):
    a = gain(logps, ref_logps, point, beta)
    parts = w_plus * (1 - a[desirable].sigmoid()), w_minus * (1 - (-a[~desirable]).sigmoid())
    return torch.cat(parts).mean()


RIGHT_LOSSES = {
    "row by row": by_rows,
    "both labels concatenated": concatenated,
    "sign times gain": lambda x, r, d, z, beta, wp=1.0, wm=1.0: mean_loss(
        gain(x, r, z, beta), d, wp, wm),
    "the package's": losses.kto_loss,
}  # fmt: skip


def class_means(x, r, d, z, beta, wp=1.0, wm=1.0):
    a = gain(x, r, z, beta)
    parts = wp * (1 - a[d].sigmoid()), wm * (1 - (-a[~d]).sigmoid())
    return sum(part.mean() for part in parts if len(part))


# name -> (loss, what the visible tests say about it)
WRONG_LOSSES = {
    "sum of the labels' means": (class_means, "ラベルごとに平均"),
    "weights swapped": (
        lambda x, r, d, z, beta, wp=1.0, wm=1.0: mean_loss(gain(x, r, z, beta), d, wm, wp),
        "重みが入れ替わって"),
    "no weights": (
        lambda x, r, d, z, beta, wp=1.0, wm=1.0: mean_loss(gain(x, r, z, beta), d, 1.0, 1.0),
        "重みが掛かっていない"),
    "undesirable rows like desirable ones": (
        lambda x, r, d, z, beta, wp=1.0, wm=1.0: mean_loss(
            torch.where(d, 1, -1) * gain(x, r, z, beta), d, wp, wm), "符号が逆になります"),
    "sign": (
        lambda x, r, d, z, beta, wp=1.0, wm=1.0: mean_loss(-gain(x, r, z, beta), d, wp, wm),
        "符号が逆のようです"),
    "no reference": (
        lambda x, r, d, z, beta, wp=1.0, wm=1.0: mean_loss(beta * (x - z.detach()), d, wp, wm),
        "参照方策の対数確率が引かれていない"),
    "no reference point": (
        lambda x, r, d, z, beta, wp=1.0, wm=1.0: mean_loss(beta * (x - r.detach()), d, wp, wm),
        "参照点が引かれていない"),
    "reference point of the wrong sign where undesirable": (
        lambda x, r, d, z, beta, wp=1.0, wm=1.0: mean_loss(
            gain(x, r, torch.where(d, z, -z), beta), d, wp, wm), "参照点の符号"),
    "no beta": (
        lambda x, r, d, z, beta, wp=1.0, wm=1.0: mean_loss(gain(x, r, z, 1.0), d, wp, wm),
        "β が掛かっていない"),
    "logarithm": (
        lambda x, r, d, z, beta, wp=1.0, wm=1.0: -torch.nn.functional.logsigmoid(
            torch.where(d, 1, -1) * gain(x, r, z, beta)).mean(), "対数をとっている"),
    "sum over the batch": (
        lambda x, r, d, z, beta, wp=1.0, wm=1.0: len(d) * mean_loss(
            gain(x, r, z, beta), d, wp, wm), "合計"),
    "gradient through the reference": (
        lambda x, r, d, z, beta, wp=1.0, wm=1.0: mean_loss(
            beta * (x - r - z.detach()), d, wp, wm), "参照方策に勾配"),
    "gradient through the reference point": (
        lambda x, r, d, z, beta, wp=1.0, wm=1.0: mean_loss(
            beta * (x - r.detach() - z), d, wp, wm), "参照点に勾配"),
    "policy detached": (
        lambda x, r, d, z, beta, wp=1.0, wm=1.0: mean_loss(
            gain(x.detach(), r, z, beta), d, wp, wm), "does not require grad"),
}  # fmt: skip

def descend(loss_of):
    """A trained_policy whose expected loss is loss_of(q, value, w_plus, w_minus)."""

    def trained_policy(q, beta, w_plus=1.0, w_minus=1.0, steps=400):
        q = torch.tensor(q, dtype=torch.float64)
        logits = torch.zeros_like(q).requires_grad_()
        optimizer = torch.optim.Adam([logits], lr=0.1)
        for _ in range(steps):
            value = torch.sigmoid(beta * (logits.log_softmax(0) + math.log(len(q))))
            optimizer.zero_grad()
            loss_of(q, value, w_plus, w_minus).backward()
            optimizer.step()
        return logits.softmax(0).detach()

    return trained_policy


RIGHT_TRAINING = descend(lambda q, v, wp, wm: (wp * q * (1 - v) + wm * (1 - q) * v).mean())

# In the place of question 3's training, where another question is at stake: trained once.
QUICK = {"trained_policy": functools.cache(RIGHT_TRAINING)}


@pytest.mark.parametrize("name", RIGHT_LOSSES)
def test_right_losses_pass_everything(notebook, grade, name):
    results = grade(notebook, {"kto_loss": RIGHT_LOSSES[name], **QUICK})
    assert results.failed == set(), results


@pytest.mark.parametrize("name", WRONG_LOSSES)
def test_wrong_losses_are_rejected_and_the_visible_tests_say_why(notebook, grade, name):
    loss, hint = WRONG_LOSSES[name]
    answers = {"kto_loss": loss, **QUICK}
    assert grade(notebook, answers, part="hidden").failed & LOSS_TESTS
    seen = grade(notebook, answers, part="visible")
    assert any(hint in str(seen[cell]) for cell in seen.failed & LOSS_TESTS), seen


RIGHT_POINTS = {
    "relu": lambda m, r: torch.relu((m - r).detach().mean()),
    "maximum": lambda m, r: torch.maximum(
        (m - r).detach().sum() / len(m), torch.zeros((), dtype=m.dtype)),
    "the package's": losses.kto_reference_point,
}  # fmt: skip
WRONG_POINTS = {
    "not clamped": (lambda m, r: (m - r).mean().detach(), "0 に切ります"),
    "absolute value": (lambda m, r: (m - r).mean().abs().detach(), "0 に切ります"),
    "with gradient": (lambda m, r: (m - r).mean().clamp(min=0), "勾配が流れています"),
    "clamped by row": (lambda m, r: (m - r).clamp(min=0).mean().detach(), "行ごとに切って"),
    "sum": (lambda m, r: (m - r).sum().clamp(min=0).detach(), "合計"),
    "turned around": (lambda m, r: (r - m).mean().clamp(min=0).detach(), "向きが逆"),
    "no reference": (lambda m, r: m.mean().detach(), "引かれていない"),
    "no mean": (lambda m, r: (m - r).clamp(min=0).detach(), "スカラー"),
}


@pytest.mark.parametrize("name", RIGHT_POINTS)
def test_right_reference_points_pass(notebook, grade, name):
    assert grade(notebook, {"kto_reference_point": RIGHT_POINTS[name], **QUICK}).failed == set()


@pytest.mark.parametrize("name", WRONG_POINTS)
def test_wrong_reference_points_are_rejected(notebook, grade, name):
    point, hint = WRONG_POINTS[name]
    answers = {"kto_reference_point": point, **QUICK}
    assert grade(notebook, answers, part="hidden").failed == {"test_reference_point"}
    assert hint in str(grade(notebook, answers, part="visible")["test_reference_point"])


def refusing(pairing):
    def mismatched(completions):
        if len(completions) < 2:
            raise ValueError("at least two rows")
        return pairing(completions)

    return mismatched


@pytest.mark.parametrize(
    "right",
    [lambda rows: rows[-1:] + rows[:-1], lambda rows: [rows[i - 1] for i in range(len(rows))]],
)
def test_right_pairings_pass(notebook, grade, right):
    assert grade(notebook, {"mismatched": refusing(right), **QUICK}).failed == set()


@pytest.mark.parametrize(
    "wrong, hint",
    [
        (refusing(lambda rows: rows[::-1]), "逆順"),
        (refusing(lambda rows: rows[1:] + rows[:1]), "向きが逆"),
        (refusing(list), "ずれていません"),
        (lambda rows: rows[-1:] + rows[:-1], "ValueError"),
    ],
    ids=["reversed", "rotated the other way", "matched", "one row accepted"],
)
def test_wrong_pairings_are_rejected(notebook, grade, wrong, hint):
    answers = {"mismatched": wrong, **QUICK}
    assert grade(notebook, answers, part="hidden").failed == {"test_mismatched"}
    assert hint in str(grade(notebook, answers, part="visible")["test_mismatched"])


def test_exactly_one_identity_fails_for_the_planted_bug(notebook):
    names = {}
    for cell in notebook.cells:
        if cell.id in ("imports", "buggy_kto_loss", "show_identities", "kto_loss"):
            exec(cell.source, names)

    def off(loss, beta, z):
        return [abs(left - right) > 1e-6 for _, left, right in names["identities"](loss, beta, z)]

    for beta in (0.1, 0.5):
        assert off(names["buggy_kto_loss"], beta, 0.0) == [False, False, False]
        assert off(names["buggy_kto_loss"], beta, 2.0) == [False, True, False]
        assert off(names["kto_loss"], beta, 2.0) == [False, False, False]


@pytest.mark.parametrize(
    "number, left", [(1, 1.0), (1, 0.5), (3, 0.7), (2, 1.0), (2, 0.5), (2, 2.0), (2, math.nan)]
)
def test_a_wrong_diagnosis_is_rejected(notebook, grade, number, left):
    answer = dict(failed_identity=number, left_side=left)
    assert grade(notebook, {"failed_identity": answer, **QUICK}).failed == {"test_failed_identity"}


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x, r, d, z, beta: mean_loss(gain(x, r, torch.where(d, z, -z), beta), d, 1.0, 1.0),
        lambda x, r, d, z, beta: mean_loss(gain(x, r, 0 * z, beta), d, 1.0, 1.0),
        lambda x, r, d, z, beta: mean_loss(gain(x, r, -z, beta), d, 1.0, 1.0),
        lambda x, r, d, z, beta: mean_loss(-gain(x, r, z, beta), d, 1.0, 1.0),
    ],
    ids=["unchanged", "no reference point", "point added", "sign"],
)
def test_a_wrong_repair_is_rejected(notebook, grade, wrong):
    answers = {"repaired_kto_loss": wrong, **QUICK}
    assert grade(notebook, answers).failed == {"test_repaired"}


@pytest.mark.parametrize(
    "equal, border, wrong",
    [
        (1.0, 2.333, set()),
        (1, torch.tensor(7 / 3), set()),
        (0.6, 2.333, {"test_predicted_equal"}),
        (0.9, 2.333, {"test_predicted_equal"}),
        (1.0, 10 / 3, {"test_predicted_border"}),
        (1.0, 3.0, {"test_predicted_border"}),
        (1.0, 3 / 7, {"test_predicted_border"}),
    ],
)
def test_predictions(notebook, grade, equal, border, wrong):
    answer = dict(predicted_equal=equal, predicted_border=border)
    assert grade(notebook, {"predictions": answer, **QUICK}).failed == wrong


def test_a_right_training_passes(notebook, grade):
    assert grade(notebook, {"trained_policy": RIGHT_TRAINING}).failed == set()


@pytest.mark.parametrize(
    "wrong",
    [
        descend(lambda q, v, wp, wm: (q * (1 - v) + (1 - q) * v).mean()),
        descend(lambda q, v, wp, wm: (wm * q * (1 - v) + wp * (1 - q) * v).mean()),
        descend(lambda q, v, wp, wm: (wp * q * (1 - v)).mean()),
        descend(lambda q, v, wp, wm: -(q * v.log() + (1 - q) * (1 - v).log()).mean()),
        lambda *_, **__: torch.tensor([1.0, 0.0, 0.0]),
    ],
    ids=["no weights", "weights swapped", "True only", "cross entropy", "one number"],
)
def test_wrong_trainings_are_rejected(notebook, grade, wrong):
    assert grade(notebook, {"trained_policy": wrong}).failed == {"test_trained_policy"}
