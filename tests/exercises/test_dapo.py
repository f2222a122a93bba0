"""5.3.3 DAPO: what the exercise's tests accept and reject."""

import math

import pytest
import torch

import exercises
from companion import losses

SOURCE = exercises.SOURCES / "5.3.3-dapo.py"
LOSS_TESTS = {"test_value", "test_batch", "test_gradient"}


@pytest.fixture
def grade(grade):
    """Without what is slow and no given answer can change.

    That is the figure of question 4, which is not graded, and the measurement of question 3 where
    the answers are to other questions.
    """

    def run(notebook, answers=None, part="all"):
        left_out = {"penalty_figure": {}}
        if answers and "fill_batch" not in answers:
            left_out |= {"test_fill_batch": {}, "comparison": {}}
        return grade(notebook, left_out | (answers or {}), part)

    return run


def log_ratio(x, old, mask):
    return torch.where(mask > 0, x - old.detach(), 0.0)


def objective(w, A, low, high):
    return torch.minimum(w * A, w.clamp(1 - low, 1 + high) * A)


def token_mean(rows, mask, n):
    return -(rows * mask).sum() / (mask.sum() if n is None else n)


def loss(rows_of=objective, mean=token_mean, advantages=torch.Tensor.detach):
    """A dapo_loss with one part replaced."""

    def dapo_loss(x, old, A, mask, low, high, n=None, num_tokens=None):
        n = num_tokens if n is None else n
        w = log_ratio(x, old, mask).exp()
        return mean(rows_of(w, advantages(A)[:, None], low, high), mask, n)

    return dapo_loss


def token_by_token(x, old, A, mask, low, high, num_tokens=None):
    total, count = 0.0, 0
    for i, t in mask.nonzero().tolist():
        w, a = (x[i, t] - old[i, t].detach()).exp(), A[i].detach()
        total = total + torch.min(w * a, w.clamp(1 - low, 1 + high) * a)
        count += 1
    return -total / (num_tokens or count)


def by_selection(x, old, A, mask, low, high, num_tokens=None):
    real = mask.bool()
    a = A.detach()[:, None].expand_as(x)[real]
    w = (x[real] - old.detach()[real]).exp()
    rows = torch.where(a >= 0, w.clamp(max=1 + high), w.clamp(min=1 - low)) * a
    return -rows.sum() / (real.sum() if num_tokens is None else num_tokens)


RIGHT_LOSSES = {
    "token by token": token_by_token,
    "selected tokens, clip by the sign": by_selection,
    "the maximum of losses": loss(
        lambda w, A, low, high: -torch.maximum(-w * A, -w.clamp(1 - low, 1 + high) * A)),
    "the package's": losses.dapo_loss,
}  # fmt: skip


def mask_after_exp(x, old, A, mask, low, high, num_tokens=None):
    w = (x - old.detach()).exp()
    return token_mean(objective(w, A.detach()[:, None], low, high), mask, num_tokens)


def where_after_exp(x, old, A, mask, low, high, num_tokens=None):
    w = (x - old.detach()).exp()
    rows = torch.where(mask > 0, objective(w, A.detach()[:, None], low, high), 0.0)
    return -rows.sum() / (mask.sum() if num_tokens is None else num_tokens)


def old_with_gradient(x, old, A, mask, low, high, num_tokens=None):
    w = torch.where(mask > 0, x - old, 0.0).exp()
    return token_mean(objective(w, A.detach()[:, None], low, high), mask, num_tokens)


# name -> (loss, what the visible tests say about it)
WRONG_LOSSES = {
    "sign": (loss(mean=lambda rows, mask, n: -token_mean(rows, mask, n)), "符号が逆"),
    "maximum": (
        loss(lambda w, A, low, high: torch.maximum(w * A, w.clamp(1 - low, 1 + high) * A)),
        "超えたら、そこで切ります"),
    "maximum where A < 0": (
        loss(lambda w, A, low, high: torch.where(
            A >= 0, objective(w, A, low, high),
            torch.maximum(w * A, w.clamp(1 - low, 1 + high) * A))),
        "比が 1 − ε_low より小さければ"),
    "clipped on both sides": (
        loss(lambda w, A, low, high: w.clamp(1 - low, 1 + high) * A), "大きい側は切りません"),
    "no clip": (loss(lambda w, A, low, high: w * A), "そこで切ります"),
    "lower width above too": (
        loss(lambda w, A, low, high: objective(w, A, low, low)), "ε_low を使っている"),
    "upper width below too": (
        loss(lambda w, A, low, high: objective(w, A, high, high)), "比が 1 − ε_low より小さければ"),
    "widths swapped": (
        loss(lambda w, A, low, high: objective(w, A, high, low)), "ε_low を使っている"),
    "no ratio": (loss(lambda w, A, low, high: A * w / w.detach()), "重要度比が掛かっていない"),
    "logarithm of the ratio": (
        loss(lambda w, A, low, high: objective(w.log(), A, low, high)), "対数の差の指数"),
    "response means": (
        loss(mean=lambda rows, mask, n: -(
            (rows * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()), "GRPO の平均"),
    "padded width": (
        loss(mean=lambda rows, mask, n: -(rows * mask).sum() / (n or mask.numel())),
        "パディングも含めた"),
    "sum": (loss(mean=lambda rows, mask, n: -(rows * mask).sum()), "合計"),
    "over responses": (
        loss(mean=lambda rows, mask, n: -(rows * mask).sum(1).mean()), "回答の数で割って"),
    "no sum": (loss(mean=lambda rows, mask, n: -(rows * mask).sum(1)), "スカラー"),
    "num_tokens ignored": (
        loss(mean=lambda rows, mask, n: token_mean(rows, mask, None)), "num_tokens が渡されたら"),
    "mask after exp": (mask_after_exp, "漏れて"),
    "old log-probs with gradient": (old_with_gradient, "引いたときの方策に勾配"),
    "advantages with gradient": (loss(advantages=lambda A: A), "アドバンテージに勾配"),
    "policy detached": (
        lambda x, *rest, **n: loss()(x.detach(), *rest, **n), "does not require grad"),
}  # fmt: skip


def right_fill(rates, G, wanted, generator, *, keep=None, count_all=True):
    keep = keep or (lambda r: 0 < r.sum() < G)
    kept, drawn = [], 0
    while len(kept) < wanted:
        problem = torch.randint(len(rates), (), generator=generator)
        rewards = (torch.rand(G, generator=generator) < rates[problem]).double()
        ok = keep(rewards)
        drawn += bool(ok) or count_all
        if ok:
            kept.append(rewards)
    return torch.stack(kept), drawn


def in_rounds(rates, G, wanted, generator):
    kept, drawn = right_fill(rates, G, wanted, generator)
    return kept.tolist() and kept, math.ceil(drawn / wanted) * wanted


def test_the_points(notebook):
    points = {
        cell.id: exercises.grader(cell)["points"]
        for cell in notebook.cells
        if exercises.grader(cell).get("grade")
    }
    assert sum(points.values()) == 20 and points["explanation"] == 3


@pytest.mark.parametrize("name", RIGHT_LOSSES)
def test_right_losses_pass_everything(notebook, grade, name):
    results = grade(notebook, {"dapo_loss": RIGHT_LOSSES[name]})
    assert results.failed == set(), results


@pytest.mark.parametrize("name", WRONG_LOSSES)
def test_wrong_losses_are_rejected_and_the_visible_tests_say_why(notebook, grade, name):
    wrong, hint = WRONG_LOSSES[name]
    hidden = grade(notebook, {"dapo_loss": wrong}, part="hidden").failed
    assert hidden & LOSS_TESTS and hidden <= LOSS_TESTS
    seen = grade(notebook, {"dapo_loss": wrong}, part="visible")
    assert any(hint in str(seen[cell]) for cell in seen.failed & LOSS_TESTS), seen


def test_a_mask_after_exp_that_spoils_only_gradients_is_rejected(notebook, grade):
    answers = {"dapo_loss": where_after_exp}
    assert grade(notebook, answers).failed == {"test_gradient"}


@pytest.mark.parametrize(
    "right",
    [
        losses.overlong_penalty,
        lambda n, top, cache: torch.where(
            n <= top - cache, 0.0, torch.where(n <= top, (top - cache - n) / cache, -1.0)),
        lambda n, top, cache: -torch.clamp((n - (top - cache)) / cache, min=0, max=1),
    ],
    ids=["the package's", "three pieces", "clamp"],
)  # fmt: skip
def test_right_penalties_pass(notebook, grade, right):
    assert grade(notebook, {"overlong_penalty": right}).failed == set()


@pytest.mark.parametrize(
    "wrong, hint",
    [
        (lambda n, top, cache: ((n - top + cache) / cache).clamp(0, 1), "符号が逆"),
        (lambda n, top, cache: ((top - cache - n) / top).clamp(-1, 0), "L_max で割って"),
        (lambda n, top, cache: -(n / top).clamp(0, 1), "罰の始まりが違う"),
        (lambda n, top, cache: ((top - n) / cache).clamp(-1, 0), "罰が始まるのは"),
        (lambda n, top, cache: torch.where(n > top - cache, -1.0, 0.0), "少しずつ下がります"),
        (lambda n, top, cache: ((top - cache - n) / cache).clamp(max=0), "端の扱い"),
        (lambda n, top, cache: ((top - cache - n) / cache).clamp(-1, 0).sum(), "同じ形状"),
    ],
    ids=["sign", "over L_max", "share of L_max", "late", "hard", "no floor", "sum"],
)
def test_wrong_penalties_are_rejected(notebook, grade, wrong, hint):
    answers = {"overlong_penalty": wrong}
    assert grade(notebook, answers, part="hidden").failed == {"test_overlong"}
    assert hint in str(grade(notebook, answers, part="visible")["test_overlong"])


def test_exactly_one_identity_fails_for_the_planted_bug(notebook):
    names = {}
    for cell in notebook.cells:
        if cell.id in ("imports", "buggy_dapo_loss", "show_identities", "repaired_dapo_loss"):
            exec(cell.source, names)

    def off(loss, lengths):
        return [abs(left - right) > 1e-6 for _, left, right in names["identities"](loss, lengths)]

    for lengths in ((3, 3, 3, 3), (2, 4, 5, 1)):  # as many tokens in both parts
        assert off(names["buggy_dapo_loss"], lengths) == [False, False, False]
    for lengths in ((1, 2, 6, 9), (5, 1, 1, 1)):
        assert off(names["buggy_dapo_loss"], lengths) == [False, True, False]
        assert off(names["repaired_dapo_loss"], lengths) == [False, False, False]


@pytest.mark.parametrize("number, left", [(1, -1.0), (3, 0.5), (2, 0.0), (2, -1.0), (2, math.nan)])
def test_a_wrong_diagnosis_is_rejected(notebook, grade, number, left):
    answer = dict(failed_identity=number, left_side=left)
    assert grade(notebook, {"failed_identity": answer}).failed == {"test_failed_identity"}


def test_the_right_side_is_no_left_side(notebook, grade):
    names = {}
    for cell in notebook.cells:
        if cell.id in ("imports", "buggy_dapo_loss", "show_identities"):
            exec(cell.source, names)
    whole = names["identities"](names["buggy_dapo_loss"], (1, 2, 6, 9))[1][2]
    answer = dict(failed_identity=2, left_side=whole)
    assert grade(notebook, {"failed_identity": answer}).failed == {"test_failed_identity"}


def parts_loss(divide):
    """A repaired_dapo_loss: divide(objective and mask of each part) gives the mean."""

    def repaired_dapo_loss(parts, low=0.2, high=0.28):
        rows = [
            (objective((x - old).exp(), A[:, None], low, high) * mask, mask)
            for x, old, A, mask in parts
        ]
        return -divide(rows)

    return repaired_dapo_loss


@pytest.mark.parametrize(
    "right",
    [
        parts_loss(lambda rows: sum(o.sum() for o, _ in rows) / sum(m.sum() for _, m in rows)),
        parts_loss(lambda rows: sum(
            o.sum() / m.sum() * m.sum() / sum(k.sum() for _, k in rows) for o, m in rows)),
        lambda parts: losses.dapo_loss(*map(torch.cat, zip(*parts, strict=True)), 0.2, 0.28),
    ],
    ids=["sums", "weighted means", "joined"],
)  # fmt: skip
def test_right_repairs_pass(notebook, grade, right):
    assert grade(notebook, {"repaired_dapo_loss": right}).failed == set()


@pytest.mark.parametrize(
    "wrong",
    [
        parts_loss(lambda rows: sum(o.sum() / m.sum() for o, m in rows) / len(rows)),
        parts_loss(lambda rows: sum(o.sum() / m.sum() for o, m in rows)),
        parts_loss(lambda rows: sum(o.sum() for o, _ in rows)
                   / sum(m.sum() for _, m in rows) / len(rows)),
        parts_loss(lambda rows: sum(o.sum() for o, _ in rows) / sum(m.numel() for _, m in rows)),
        parts_loss(lambda rows: torch.cat([o.sum(1) / m.sum(1) for o, m in rows]).mean()),
    ],
    ids=["unchanged", "sum of means", "divided twice", "padded width", "response means"],
)  # fmt: skip
def test_wrong_repairs_are_rejected(notebook, grade, wrong):
    assert grade(notebook, {"repaired_dapo_loss": wrong}).failed == {"test_repaired"}


@pytest.mark.parametrize(
    "share, draws, wrong",
    [
        (0.6562, 46.54, set()),
        (torch.tensor(0.656), torch.tensor(46.5), set()),
        (0.125, 46.54, {"test_predicted_share"}),
        (0.3438, 46.54, {"test_predicted_share"}),
        (0.81, 46.54, {"test_predicted_share"}),
        (0.6562, 16 / 0.6562, {"test_predicted_draws"}),
        (0.6562, 16 / 0.875, {"test_predicted_draws"}),
        (0.6562, 16.0, {"test_predicted_draws"}),
        (0.6562, 16 * 1.6562, {"test_predicted_draws"}),
    ],
)
def test_predictions(notebook, grade, share, draws, wrong):
    answer = dict(predicted_share=share, predicted_draws=draws)
    assert grade(notebook, {"predictions": answer}).failed == wrong


def test_a_right_measurement_passes(notebook, grade):
    assert grade(notebook, {"fill_batch": right_fill}).failed == set()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda *a: right_fill(*a, count_all=False),
        lambda *a: right_fill(*a, keep=lambda r: r.sum() > 0),
        lambda *a: right_fill(*a, keep=lambda r: r.sum() < len(r)),
        lambda *a: right_fill(*a, keep=lambda r: True),
        in_rounds,
        lambda rates, G, wanted, g: right_fill([sum(rates) / len(rates)], G, wanted, g),
        lambda rates, G, wanted, g: (right_fill(rates, G, wanted, g)[0], round(2.9 * wanted)),
    ],
    ids=["kept counted", "all right kept", "all wrong kept", "all kept", "whole rounds",
         "mean rate", "a number written in"],
)  # fmt: skip
def test_wrong_measurements_are_rejected(notebook, grade, wrong):
    assert grade(notebook, {"fill_batch": wrong}).failed == {"test_fill_batch"}


def test_the_figure_of_the_question_shows_what_the_answer_says(notebook):
    names = {}
    for cell in notebook.cells:
        if cell.id in ("imports", "penalty_training"):
            exec(cell.source, names)
    run = names["train_with_penalty"]
    plain, penalised, small, dynamic = (
        run(*setting)[0, -1].item()
        for setting in ((0.0, False), (0.5, False), (0.05, False), (0.5, True))
    )
    assert plain > 0.9 and dynamic > 0.9 and penalised < 0.02 and small < 0.02
