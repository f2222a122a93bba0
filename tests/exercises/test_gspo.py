"""5.3.4 GSPO: what the exercise's tests accept and reject."""

import itertools
import math

import pytest
import torch

import exercises
from companion import losses

SOURCE = exercises.SOURCES / "5.3.4-gspo.py"
RATIO_TESTS = {"test_ratio", "test_ratio_gradient"}
LOSS_TESTS = {"test_value", "test_batch", "test_gradient"}


def log_w_of(logps, old_logps, mask):
    return torch.where(mask > 0, logps - old_logps.detach(), 0.0)


def log_mean(logps, old_logps, mask):
    return log_w_of(logps, old_logps, mask).sum(-1) / mask.sum(-1).clamp(min=1)


def row_by_row(logps, old_logps, mask):
    rows = []
    for row, old_row, real in zip(logps, old_logps, mask, strict=True):
        size = int(real.sum())
        gaps = row[:size] - old_row[:size].detach()
        rows.append(gaps.mean().exp() if size else torch.ones((), dtype=logps.dtype))
    return torch.stack(rows)


RIGHT_RATIOS = {
    "where": lambda x, o, m: log_mean(x, o, m).exp(),
    "row by row": row_by_row,
    "geometric mean of the product": lambda x, o, m: (
        log_w_of(x, o, m).exp().prod(-1) ** (1 / m.sum(-1).clamp(min=1))),
    "weights that sum to 1": lambda x, o, m: (
        (x - o.detach()) * m / m.sum(-1, keepdim=True).clamp(min=1)).sum(-1).exp(),
}  # fmt: skip

# name -> (ratio, what the visible tests say about it)
WRONG_RATIOS = {
    "product": (lambda x, o, m: log_w_of(x, o, m).sum(-1).exp(), "積になって"),
    "mean over the padded width": (lambda x, o, m: log_w_of(x, o, m).mean(-1).exp(), "幅で割って"),
    "no mask": (lambda x, o, m: (x - o.detach()).mean(-1).exp(), "パディングの値"),
    "no mask in the sum": (
        lambda x, o, m: ((x - o.detach()).sum(-1) / m.sum(-1).clamp(min=1)).exp(),
        "パディングの値"),
    "turned around": (lambda x, o, m: (-log_mean(x, o, m)).exp(), "向きが逆"),
    "arithmetic mean": (
        lambda x, o, m: (log_w_of(x, o, m).exp() * m).sum(-1) / m.sum(-1).clamp(min=1),
        "算術平均"),
    "no exponential": (log_mean, "指数をとっていない"),
    "no old policy": (
        lambda x, o, m: ((x * m).sum(-1) / m.sum(-1).clamp(min=1)).exp(), "引かれていない"),
    "per token": (lambda x, o, m: log_w_of(x, o, m).exp(), "回答ごとに 1 つ"),
    "mean over the batch": (lambda x, o, m: log_mean(x, o, m).exp().mean(), "回答ごとに 1 つ"),
    "an empty response is NaN": (
        lambda x, o, m: (log_w_of(x, o, m).sum(-1) / m.sum(-1)).exp(), "ξ は 1"),
    "policy detached": (lambda x, o, m: log_mean(x.detach(), o, m).exp(), "does not require grad"),
    "old policy not detached": (
        lambda x, o, m: (((x - o) * m).sum(-1) / m.sum(-1).clamp(min=1)).exp(),
        "生成時の方策に勾配"),
}  # fmt: skip


def written(
    xi=lambda x, o, m: log_mean(x, o, m).exp(),
    value=lambda xi, a, e: torch.minimum(xi * a, xi.clamp(1 - e, 1 + e) * a),
    mean=lambda w, m: torch.where(m.sum(-1) > 0, w, 0.0).mean(),
    sign=-1,
    data=lambda a: a.detach(),
):
    """A loss from its ratio, what it does with a response's ratio, and its mean."""

    def loss(logps, old_logps, advantages, mask, epsilon):
        return sign * mean(value(xi(logps, old_logps, mask), data(advantages), epsilon), mask)

    return loss


def by_sign(xi, a, e):
    return torch.where(a > 0, xi.clamp(max=1 + e), xi.clamp(min=1 - e)) * a


def by_loop(logps, old_logps, advantages, mask, epsilon):
    total = 0.0
    for i, xi in enumerate(row_by_row(logps, old_logps, mask)):
        if mask[i].sum() > 0:
            a = advantages[i].item()
            clipped = xi.clamp(1 - epsilon, 1 + epsilon)
            total = total - torch.minimum(xi * a, clipped * a)
    return total / len(logps) if isinstance(total, torch.Tensor) else (logps * 0).sum()


RIGHT_LOSSES = {
    "minimum": written(),
    "clip on one side by the sign": written(value=by_sign),
    "one response at a time": by_loop,
    "broadcast over tokens": written(
        mean=lambda w, m: ((w[:, None] * m).sum(-1) / m.sum(-1).clamp(min=1)).mean()),
    "max of the negatives": written(
        sign=1, value=lambda xi, a, e: torch.maximum(-xi * a, -xi.clamp(1 - e, 1 + e) * a)),
    "the package's": losses.gspo_loss,
}  # fmt: skip


def per_token(logps, old_logps, advantages, mask, epsilon):
    return losses.grpo_loss(logps, old_logps, advantages, mask, epsilon)


WRONG_LOSSES = {
    "product": (written(xi=lambda x, o, m: log_w_of(x, o, m).sum(-1).exp()), "積"),
    "mean over the padded width": (
        written(xi=lambda x, o, m: log_w_of(x, o, m).mean(-1).exp()), "幅で割って"),
    "GRPO": (per_token, "トークンごとの比"),
    "sign": (written(sign=1), "符号が逆"),
    "no advantage": (
        written(value=lambda xi, a, e: torch.minimum(xi, xi.clamp(1 - e, 1 + e))),
        "掛かっていない"),
    "no clip": (written(value=lambda xi, a, e: xi * a), "クリップが働いていません"),
    "clip without min": (written(value=lambda xi, a, e: xi.clamp(1 - e, 1 + e) * a), "min をとり"),
    "max": (
        written(value=lambda xi, a, e: torch.maximum(xi * a, xi.clamp(1 - e, 1 + e) * a)),
        "クリップが働いていません"),
    "clip of the log": (
        written(value=lambda xi, a, e: torch.minimum(
            xi * a, xi.log().clamp(-e, e).exp() * a)), "1 + ε に切られます"),
    "token mean": (
        written(mean=lambda w, m: (w[:, None] * m).sum() / m.sum().clamp(min=1)), "トークンの数"),
    "an empty response counts as xi = 1": (written(mean=lambda w, m: w.mean()), "0 として数えます"),
    "an empty response is left out": (
        written(mean=lambda w, m: w[m.sum(-1) > 0].sum() / (m.sum(-1) > 0).sum().clamp(min=1)),
        "分母に入れ"),
    "sum": (written(mean=lambda w, m: (w * (m.sum(-1) > 0)).sum()), "合計"),
    "no mean": (written(mean=lambda w, m: w), "スカラー"),
    "old policy not detached": (
        written(xi=lambda x, o, m: (((x - o) * m).sum(-1) / m.sum(-1).clamp(min=1)).exp()),
        "生成時の方策に勾配"),
    "advantage not detached": (written(data=lambda a: a), "アドバンテージに勾配"),
    "policy detached": (
        written(xi=lambda x, o, m: log_mean(x.detach(), o, m).exp()), "does not require grad"),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT_RATIOS)
def test_right_ratios_pass_everything(notebook, grade, name):
    results = grade(notebook, {"sequence_ratio": RIGHT_RATIOS[name]})
    assert results.failed == set(), results


@pytest.mark.parametrize("name", WRONG_RATIOS)
def test_wrong_ratios_are_rejected_and_the_visible_tests_say_why(notebook, grade, name):
    ratio, hint = WRONG_RATIOS[name]
    answers = {"sequence_ratio": ratio}
    assert grade(notebook, answers, part="hidden").failed & RATIO_TESTS
    seen = grade(notebook, answers, part="visible")
    assert any(hint in str(seen[cell]) for cell in seen.failed & RATIO_TESTS), seen


@pytest.mark.parametrize("name", RIGHT_LOSSES)
def test_right_losses_pass_everything(notebook, grade, name):
    results = grade(notebook, {"gspo_loss": RIGHT_LOSSES[name]})
    assert results.failed == set(), results


@pytest.mark.parametrize("name", WRONG_LOSSES)
def test_wrong_losses_are_rejected_and_the_visible_tests_say_why(notebook, grade, name):
    loss, hint = WRONG_LOSSES[name]
    answers = {"gspo_loss": loss}
    assert grade(notebook, answers, part="hidden").failed & LOSS_TESTS
    seen = grade(notebook, answers, part="visible")
    assert any(hint in str(seen[cell]) for cell in seen.failed & LOSS_TESTS), seen


def test_exactly_one_identity_fails_for_the_planted_bug(notebook):
    names = {}
    wanted = ("imports", "batches", "buggy_ratio", "show_identities", "sequence_ratio")
    for cell in notebook.cells:
        if cell.id in wanted:
            exec(cell.source, names)

    def off(ratio, lengths):
        return [abs(left - right) > 1e-6
                for _, left, right in names["identities"](ratio, lengths)]

    for lengths in ((2, 8), (1, 3, 5)):
        assert off(names["buggy_ratio"], (4, 4)) == [False, False, False]
        assert off(names["buggy_ratio"], lengths) == [False, False, True]
        assert off(WRONG_RATIOS["product"][0], lengths)[2] is (min(lengths) > 1)
        assert off(names["sequence_ratio"], lengths) == [False, False, False]


@pytest.mark.parametrize(
    "number, left", [(1, 1.0), (2, 1.0), (2, 0.7), (3, 1.6487), (3, 1.0), (3, 2.718), (3, math.nan)]
)
def test_a_wrong_diagnosis_is_rejected(notebook, grade, number, left):
    answer = dict(failed_identity=number, left_side=left)
    assert grade(notebook, {"failed_identity": answer}).failed == {"test_failed_identity"}


@pytest.mark.parametrize("name", ["mean over the padded width", "product", "arithmetic mean",
                                  "turned around", "no exponential"])
def test_a_wrong_repair_is_rejected(notebook, grade, name):
    answers = {"repaired_ratio": WRONG_RATIOS[name][0]}
    assert grade(notebook, answers).failed == {"test_repaired"}


@pytest.mark.parametrize("name", RIGHT_RATIOS)
def test_a_right_repair_passes_in_any_form(notebook, grade, name):
    assert grade(notebook, {"repaired_ratio": RIGHT_RATIOS[name]}).failed == set()


@pytest.mark.parametrize(
    "xi, objective, mean, wrong",
    [
        (1.01005, 1.0004, 0.9, set()),
        (torch.tensor(1.01005), 1.0004, torch.tensor(0.9), set()),
        (math.e, 1.0004, 0.9, {"test_predicted_values"}),
        (1.1052, 1.0004, 0.9, {"test_predicted_values"}),
        (1.01005, 1.1052, 0.9, {"test_predicted_values"}),
        (1.01005, 1.2, 0.9, {"test_predicted_values"}),
        (1.01005, 0.9996, 0.9, {"test_predicted_values"}),
        (1.01005, 1.0004, 1.0, {"test_predicted_mean"}),
        (1.01005, 1.0004, 0.949, {"test_predicted_mean"}),
        (1.01005, 1.0004, 0.8, {"test_predicted_mean"}),
    ],
)
def test_predictions(notebook, grade, xi, objective, mean, wrong):
    answer = dict(predicted_xi=xi, predicted_objective=objective, predicted_mean=mean)
    assert grade(notebook, {"predictions": answer}).failed == wrong


def enumerated(of_response):
    """expected_ratios that sums of_response(probability under old, w's) over all responses."""

    def expected_ratios(old, new, length):
        totals = [0.0, 0.0]
        for y in itertools.product(range(len(old)), repeat=length):
            w = [new[v] / old[v] for v in y]
            values = of_response(math.prod(old[v] for v in y), math.prod(new[v] for v in y), w)
            totals = [total + value for total, value in zip(totals, values, strict=True)]
        return tuple(totals)

    return expected_ratios


@pytest.mark.parametrize(
    "right",
    [
        enumerated(lambda p, q, w: (p * math.prod(w), p * math.prod(w) ** (1 / len(w)))),
        enumerated(lambda p, q, w: (q, p ** (1 - 1 / len(w)) * q ** (1 / len(w)))),
        lambda old, new, n: (1.0, sum(
            p ** (1 - 1 / n) * q ** (1 / n) for p, q in zip(old, new, strict=True)) ** n),
    ],
    ids=["product and its root", "between the two policies", "closed form"],
)
def test_right_measurements_pass(notebook, grade, right):
    assert grade(notebook, {"expected_ratios": right}).failed == set()


@pytest.mark.parametrize(
    "wrong",
    [
        enumerated(lambda p, q, w: (p * math.prod(w), p * sum(w) / len(w))),
        enumerated(lambda p, q, w: (p * math.prod(w), q * math.prod(w) ** (1 / len(w)))),
        enumerated(lambda p, q, w: (p * math.prod(w), p * math.prod(w))),
        enumerated(lambda p, q, w: (math.prod(w), math.prod(w) ** (1 / len(w)))),
        enumerated(lambda p, q, w: (p * math.prod(w), p * math.prod(w) ** 0.5)),
        lambda *_: (1.0, 0.9),
    ],
    ids=["arithmetic mean", "under the new policy", "product twice", "no probabilities",
         "length written in", "one number"],
)
def test_wrong_measurements_are_rejected(notebook, grade, wrong):
    assert grade(notebook, {"expected_ratios": wrong}).failed == {"test_expected_ratios"}
