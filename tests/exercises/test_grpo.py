"""5.3.1 GRPO: what the exercise's tests accept and reject."""

import math

import pytest
import torch

import exercises
from companion import losses

SOURCE = exercises.SOURCES / "5.3.1-grpo.py"
LOSS_TESTS = {"test_clip", "test_kl", "test_lengths", "test_data"}


# --- the advantages


def by_loop(rewards, group_size):
    if group_size < 2 or len(rewards) == 0 or len(rewards) % group_size:
        raise ValueError("group_size")
    found = []
    for start in range(0, len(rewards), group_size):
        group = rewards[start : start + group_size]
        found += [(r - group.mean()) / (group.std() + 1e-4) for r in group]
    return torch.stack(found)


def scaled(scale, groups=lambda r, size: r.view(-1, size), back=lambda a: a.reshape(-1)):
    def advantages(rewards, group_size):
        if group_size < 2 or len(rewards) % group_size:
            raise ValueError("group_size")
        r = groups(rewards, group_size)
        return back((r - r.mean(-1, keepdim=True)) / scale(r))

    return advantages


def std(r, unbiased=True):
    return r.std(-1, keepdim=True, unbiased=unbiased)


RIGHT_ADVANTAGES = {
    "loop": by_loop,
    "remainder before size": lambda r, size: by_loop(r, size if len(r) % size == 0 else 0),
    "var": scaled(lambda r: r.var(-1, keepdim=True).sqrt() + 1e-4),
    "the package's": losses.group_advantages,
}  # fmt: skip
WRONG_ADVANTAGES = {
    "divisor G": (scaled(lambda r: std(r, unbiased=False) + 1e-4), "G で割る標準偏差"),
    "no 1e-4": (scaled(lambda r: std(r).clamp(min=1e-30)), "1e-4 が足されていない"),
    "1e-8": (scaled(lambda r: std(r) + 1e-8), "1e-4 が足されていない"),
    "no std": (scaled(lambda r: 1.0), "標準偏差で割られていない"),
    "variance": (scaled(lambda r: std(r) ** 2 + 1e-4), "分散"),
    "the whole batch": (
        scaled(lambda r: std(r) + 1e-4, groups=lambda r, size: r.view(1, -1)), "グループに分けず"),
    "interleaved": (
        scaled(lambda r: std(r) + 1e-4, groups=lambda r, size: r.view(size, -1).T,
               back=lambda a: a.T.reshape(-1)), "正しくは 1.499700"),
    "groups as rows": (scaled(lambda r: std(r) + 1e-4, back=lambda a: a), "形状は (8,)"),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT_ADVANTAGES)
def test_right_advantages_pass_everything(notebook, grade, name):
    assert grade(notebook, {"group_advantages": RIGHT_ADVANTAGES[name]}).failed == set()


@pytest.mark.parametrize("name", WRONG_ADVANTAGES)
def test_wrong_advantages_are_rejected_and_the_visible_tests_say_why(notebook, grade, name):
    wrong, hint = WRONG_ADVANTAGES[name]
    answers = {"group_advantages": wrong}
    assert "test_advantages" in grade(notebook, answers, part="hidden").failed
    assert hint in str(grade(notebook, answers, part="visible")["test_advantages"])


@pytest.mark.parametrize(
    "wrong",
    [
        lambda r, size: losses.group_advantages(r[: len(r) // size * size], size),
        lambda r, size: by_loop(r, size) if size > 1 else torch.zeros_like(r),
    ],
    ids=["odd rows dropped", "G = 1 accepted"],
)
def test_groups_that_cannot_be_are_to_be_refused(notebook, grade, wrong):
    answers = {"group_advantages": wrong}
    assert "test_bad_groups" in grade(notebook, answers, part="hidden").failed
    assert "ValueError" in str(grade(notebook, answers, part="visible")["test_bad_groups"])


# --- the loss


def make_loss(
    surrogate=lambda w, c, A: torch.minimum(w * A, c * A),
    kl=lambda d, w: d.exp() - d - 1,
    mean=lambda x, mask: (x.sum(-1) / mask.sum(-1)).mean(),
    ratio=lambda log_ratio, mask: log_ratio.exp(),
    old=torch.Tensor.detach,
    ref=torch.Tensor.detach,
    advantages=torch.Tensor.detach,
    sign=-1,
):
    """A GRPO loss with one of its parts exchanged."""

    def loss(logps, old_logps, ref_logps, A, mask, epsilon, beta):
        zero = torch.zeros_like(logps)
        pads = [torch.where(mask, x, zero) for x in (logps, old(old_logps), ref(ref_logps))]
        w = ratio(pads[0] - pads[1], mask)
        A = advantages(A)[:, None]
        d = pads[2] - pads[0]
        objective = surrogate(w, w.clamp(1 - epsilon, 1 + epsilon), A)
        return mean(torch.where(mask, sign * objective + beta * kl(d, w), zero), mask)

    return loss


def by_token(logps, old_logps, ref_logps, advantages, mask, epsilon, beta):
    total = 0.0
    for i in range(len(logps)):
        tokens = 0.0
        for t in range(int(mask[i].sum())):
            A = advantages[i].detach()
            w = (logps[i, t] - old_logps[i, t].detach()).exp()
            d = ref_logps[i, t].detach() - logps[i, t]
            W = torch.minimum(w * A, w.clamp(1 - epsilon, 1 + epsilon) * A)
            tokens = tokens + W - beta * (torch.expm1(d) - d)
        total = total + tokens / mask[i].sum()
    return -total / len(logps)


RIGHT_LOSSES = {
    "by parts": make_loss(),
    "token by token": by_token,
    "maximum of the losses": make_loss(
        surrogate=lambda w, c, A: -torch.maximum(-w * A, -c * A), kl=lambda d, w: torch.expm1(d) - d
    ),
    "a clip on one side only": lambda x, o, r, A, mask, e, b: make_loss(
        surrogate=lambda w, c, A: A * torch.where(
            A >= 0, torch.minimum(w, torch.ones_like(w) + e),
            torch.maximum(w, torch.ones_like(w) - e)))(x, o, r, A, mask, e, b),
    "the package's": lambda logps, old, ref, A, mask, epsilon, beta: losses.grpo_loss(
        logps, old, A, mask, epsilon, ref, beta
    ),
}

# name -> (loss, what the visible tests say about it)
WRONG_LOSSES = {
    "no clip": (make_loss(surrogate=lambda w, c, A: w * A), "クリップが効いていない"),
    "max for min": (
        make_loss(surrogate=lambda w, c, A: torch.maximum(w * A, c * A)), "クリップが効いていない"),
    "clip alone": (make_loss(surrogate=lambda w, c, A: c * A), "切りません"),
    "clip by the sign of A": (
        make_loss(surrogate=lambda w, c, A: torch.where(
            A >= 0, torch.minimum(w * A, c * A), torch.maximum(w * A, c * A))), "切りません"),
    "sign": (make_loss(sign=1), "符号が逆のようです"),
    "KL turned around": (
        make_loss(kl=lambda d, w: (-d).exp() + d - 1), "d の符号が逆"),
    "sign of the KL": (make_loss(kl=lambda d, w: -(d.exp() - d - 1)), "KL の項の符号"),
    "k1": (make_loss(kl=lambda d, w: -d), "k1"),
    "k2": (make_loss(kl=lambda d, w: d**2 / 2), "k2"),
    "no KL": (make_loss(kl=lambda d, w: 0 * d), "KL の項がない"),
    "ratio on the KL": (make_loss(kl=lambda d, w: w * (d.exp() - d - 1)), "比は掛けません"),
    "token mean": (make_loss(mean=lambda x, mask: x.sum() / mask.sum()), "DAPO"),
    "sum over tokens": (make_loss(mean=lambda x, mask: x.sum(-1).mean()), "和をとっている"),
    "padded width": (make_loss(mean=lambda x, mask: x.mean()), "詰め物も含めた"),
    "mask after exp": (
        lambda x, o, r, A, mask, e, b: ((torch.maximum(
            -(x - o.detach()).exp() * A.detach()[:, None],
            -(x - o.detach()).exp().clamp(1 - e, 1 + e) * A.detach()[:, None],
        ) + b * ((r.detach() - x).exp() - (r.detach() - x) - 1)) * mask
        ).sum(-1).div(mask.sum(-1)).mean(), "先にマスクしましょう"),
    "gradient through the old policy": (make_loss(old=lambda x: x), "古い方策に勾配"),
    "gradient through the reference": (make_loss(ref=lambda x: x), "参照方策に勾配"),
    "gradient through the advantages": (
        make_loss(advantages=lambda x: x), "アドバンテージに勾配"),
    "policy detached": (
        lambda x, *rest: by_token(x.detach(), *rest), "does not require grad"),
    "no mean over the batch": (
        make_loss(mean=lambda x, mask: x.sum(-1) / mask.sum(-1)), "スカラー"),
}  # fmt: skip

# What only shows off policy, on several tokens: the hidden tests alone.
HIDDEN_LOSSES = {
    "product of the ratios": make_loss(
        ratio=lambda x, mask: x.sum(-1, keepdim=True).exp().expand_as(x)),
    "sequence ratio of GSPO": make_loss(
        ratio=lambda x, mask: (x.sum(-1) / mask.sum(-1)).exp()[:, None].expand_as(x)),
    "reference for the old policy": make_loss(kl=lambda d, w: w.log().exp() - w.log() - 1 - 0 * d),
    "both clips 0.2": lambda x, o, r, A, mask, e, b: make_loss()(x, o, r, A, mask, 0.2, b),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT_LOSSES)
def test_right_losses_pass_everything(notebook, grade, name):
    results = grade(notebook, {"grpo_loss": RIGHT_LOSSES[name]})
    assert results.failed == set(), results


@pytest.mark.parametrize("name", WRONG_LOSSES)
def test_wrong_losses_are_rejected_and_the_visible_tests_say_why(notebook, grade, name):
    loss, hint = WRONG_LOSSES[name]
    answers = {"grpo_loss": loss}
    assert grade(notebook, answers).failed & LOSS_TESTS
    seen = grade(notebook, answers, part="visible")
    assert any(hint in str(seen[cell]) for cell in seen.failed & LOSS_TESTS), seen


@pytest.mark.parametrize("name", HIDDEN_LOSSES)
def test_losses_that_are_wrong_off_policy_are_rejected(notebook, grade, name):
    assert grade(notebook, {"grpo_loss": HIDDEN_LOSSES[name]}).failed & LOSS_TESTS


# --- the planted bug


def test_exactly_one_identity_fails_for_the_planted_bug(notebook):
    names = {}
    for cell in notebook.cells:
        if cell.id in ("imports", "buggy_grpo_loss", "show_identities", "repaired_grpo_loss"):
            exec(cell.source, names)

    def off(loss, pi):
        return [abs(left - right) > 1e-6 for _, left, right in names["identities"](loss, pi, 1.0)]

    assert off(names["buggy_grpo_loss"], (1 / 3, 1 / 3, 1 / 3)) == [False, False, False]
    for pi in ((0.6, 0.3, 0.1), (0.2, 0.2, 0.6)):
        assert off(names["buggy_grpo_loss"], pi) == [False, False, True]
        assert off(names["repaired_grpo_loss"], pi) == [False, False, False]


@pytest.mark.parametrize(
    "number, left", [(1, 0.1793), (2, 0.1793), (3, 0.0), (3, 0.2), (3, math.nan)]
)
def test_a_wrong_diagnosis_is_rejected(notebook, grade, number, left):
    answer = dict(failed_identity=number, left_side=left)
    assert grade(notebook, {"failed_identity": answer}).failed == {"test_failed_identity"}


def repaired(kl):
    def loss(logps, old_logps, ref_logps, advantages, mask, beta):
        zero = torch.zeros_like(logps)
        ratio = torch.where(mask, logps - old_logps.detach(), zero).exp()
        d = torch.where(mask, ref_logps.detach() - logps, zero)
        per_token = torch.where(mask, -ratio * advantages[:, None] + beta * kl(d, ratio), zero)
        return (per_token.sum(-1) / mask.sum(-1)).mean()

    return loss


@pytest.mark.parametrize(
    "wrong",
    [
        repaired(lambda d, w: (-d).exp() + d - 1),
        repaired(lambda d, w: -d),
        repaired(lambda d, w: d**2 / 2),
        repaired(lambda d, w: w * (d.exp() - d - 1)),
        repaired(lambda d, w: 0 * d),
    ],
    ids=["unchanged", "k1", "k2", "with the ratio", "no KL"],
)
def test_a_wrong_repair_is_rejected(notebook, grade, wrong):
    assert grade(notebook, {"repaired_grpo_loss": wrong}).failed == {"test_repaired"}


def test_a_right_repair_in_another_form_passes(notebook, grade):
    answers = {"repaired_grpo_loss": repaired(lambda d, w: torch.expm1(d) - d)}
    assert grade(notebook, answers).failed == set()


# --- predictions and measurement


@pytest.mark.parametrize(
    "share, ratio, wrong",
    [
        (0.3203, 1.0, set()),
        (torch.tensor(82 / 256), 1, set()),
        (0.75**4, 1.0, {"test_predicted_share"}),
        (0.25**4, 1.0, {"test_predicted_share"}),
        (1 - 82 / 256, 1.0, {"test_predicted_share"}),
        (0.3203, 2.294, {"test_predicted_ratio"}),
        (0.3203, 1.333, {"test_predicted_ratio"}),
        (0.3203, 0.7071, {"test_predicted_ratio"}),
    ],
)
def test_predictions(notebook, grade, share, ratio, wrong):
    answer = dict(predicted_share=share, predicted_ratio=ratio)
    assert grade(notebook, {"predictions": answer}).failed == wrong


def weigh(gradient_of):
    """A prompt_weight of the gradient of a group with k right ones of G, gradient_of(k, p, G)."""

    def prompt_weight(p, G):
        chances = (math.comb(G, k) * p**k * (1 - p) ** (G - k) for k in range(G + 1))
        total = sum(chance * gradient_of(k, p, G) for k, chance in enumerate(chances))
        return total / (p * (1 - p))

    return prompt_weight


def in_closed_form(k, p, G):
    return math.sqrt(k * (G - k) * (G - 1) / G) / G


@pytest.mark.parametrize(
    "right",
    [
        weigh(in_closed_form),
        weigh(lambda k, p, G: (lambda r: (
            losses.group_advantages(r, G) * (r - r.mean())).mean().item())(
                torch.tensor([1.0] * k + [0.0] * (G - k)).double())),
    ],
    ids=["closed form", "centred scores"],
)  # fmt: skip
def test_right_weights_pass(notebook, grade, right):
    assert grade(notebook, {"prompt_weight": right}).failed == set()


@pytest.mark.parametrize(
    "wrong",
    [
        weigh(lambda k, p, G: G * in_closed_form(k, p, G)),
        weigh(lambda k, p, G: k * (G - k) / G**2),
        weigh(lambda k, p, G: math.sqrt(k * (G - k)) / G),
        lambda p, G: weigh(in_closed_form)(p, G) * p * (1 - p),
        lambda p, G: 1 / math.sqrt(p * (1 - p)),
        lambda p, G: math.sqrt((G - 1) / G),
    ],
    ids=["sum", "no std", "divisor G", "not divided by the slope of p", "limit", "of G alone"],
)
def test_wrong_weights_are_rejected(notebook, grade, wrong):
    assert grade(notebook, {"prompt_weight": wrong}, part="hidden").failed >= {
        "test_prompt_weight"
    }
