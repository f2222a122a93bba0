"""2.3.5.2 GAE and PPO's clip: what the exercise's tests accept and reject."""

import functools
import math

import pytest
import torch

import exercises
from companion import losses

SOURCE = exercises.SOURCES / "2.3.5.2-ppo-clip.py"
GAE_TESTS = {"test_gae_value", "test_gae_mask"}
LOSS_TESTS = {"test_four_cases", "test_token_mean", "test_gradient"}


def train(loss_of):
    """A trained_policy that descends loss_of(logps, old_logps, advantages, epsilon), (2,) each."""

    @functools.cache
    def trained_policy(old_probs, epsilon, advantages=(1.0, -1.0), steps=1000):
        old = torch.tensor(old_probs, dtype=torch.float64).log()
        advantages = torch.tensor(advantages, dtype=torch.float64)
        logits = old.clone().requires_grad_()
        optimizer = torch.optim.SGD([logits], lr=0.05)
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of(logits.log_softmax(0), old, advantages, epsilon).backward()
            optimizer.step()
        return logits.softmax(0).detach()

    return trained_policy


def clipped_objective(x, o, A, epsilon, pick=torch.minimum):
    w = (x - o).exp()
    return pick(w * A, w.clamp(1 - epsilon, 1 + epsilon) * A)


# In the place of question 3's training, where another question is at stake: trained once.
RIGHT_TRAINING = train(lambda x, o, A, epsilon: -clipped_objective(x, o, A, epsilon).mean())
QUICK = {"trained_policy": RIGHT_TRAINING}


# GAE


def double_sum(r, V, mask, gamma=1.0, lam=0.95):
    """By the definition, row by row."""
    A = torch.zeros_like(r)
    returns = torch.zeros_like(r)
    for i, n in enumerate(mask.bool().sum(-1).tolist()):
        v = V[i, :n].tolist() + [0.0]
        delta = [r[i, t].item() + gamma * v[t + 1] - v[t] for t in range(n)]
        for t in range(n):
            A[i, t] = sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, n))
            returns[i, t] = A[i, t] + v[t]
    return A, returns


def as_a_matrix(r, V, mask, gamma=1.0, lam=0.95):
    """The TD errors times a triangle of (γλ)^l."""
    real = mask.bool()
    r, V = (x.detach().masked_fill(~real, 0) for x in (r, V))
    delta = r + gamma * torch.nn.functional.pad(V[:, 1:], (0, 1)) - V
    steps = torch.arange(r.shape[1])
    power = (steps[None, :] - steps[:, None]).clamp(min=0)
    weights = torch.triu(torch.full_like(power, 1, dtype=r.dtype) * (gamma * lam) ** power)
    A = delta @ weights.T
    return A, A + V


RIGHT_GAE = {"double sum": double_sum, "matrix": as_a_matrix, "the package's": losses.gae}


def recursion(
    delta_of, carry=lambda gamma, lam: gamma * lam, *, masked=True, detach=True, forward=False,
    returns_of=lambda A, V: A + V,
):  # fmt: skip
    def gae(r, V, mask, gamma=1.0, lam=0.95):
        real = mask.bool() if masked else torch.ones_like(mask).bool()
        if detach:
            r, V = r.detach(), V.detach()
        r, V = (torch.where(real, x, 0.0) for x in (r, V))
        after = torch.cat([V[:, 1:], torch.zeros_like(V[:, :1])], 1)
        delta = delta_of(r, V, after, gamma, lam)
        columns, last = [None] * r.shape[1], torch.zeros_like(r[:, 0])
        for t in range(r.shape[1]) if forward else reversed(range(r.shape[1])):
            last = delta[:, t] + carry(gamma, lam) * last
            columns[t] = last
        A = torch.stack(columns, 1)
        return A, returns_of(A, V)

    return gae


def td(r, V, after, gamma, lam):
    return r + gamma * after - V


def mask_at_the_end(r, V, mask, gamma=1.0, lam=0.95):
    """The recursion runs over the padding; only its results there are set to 0."""
    A, R = recursion(td, masked=False)(r, V, mask, gamma, lam)
    return torch.where(mask.bool(), A, 0.0), torch.where(mask.bool(), R, 0.0)


def own_value_after_the_end(r, V, after, gamma, lam):
    return r + gamma * torch.cat([V[:, 1:], V[:, -1:]], 1) - V


# name -> (gae, what the visible tests say about it)
WRONG_GAE = {
    "no mask": (recursion(td, masked=False), "詰め物の価値か報酬が混ざって"),
    "mask at the end": (mask_at_the_end, "詰め物の価値か報酬が混ざって"),
    "TD errors": (recursion(td, lambda gamma, lam: 0.0), "TD 誤差だけ"),
    "no lambda": (recursion(td, lambda gamma, lam: gamma), "λ が掛かっていない"),
    "no value before": (
        recursion(lambda r, V, after, gamma, lam: r + gamma * after), "V(s_t) が引かれていない"),
    "no value after": (
        recursion(lambda r, V, after, gamma, lam: r - V), "V(s_{t+1}) が足されていない"),
    "lambda on the value after": (
        recursion(lambda r, V, after, gamma, lam: r + gamma * lam * after - V), "λ は掛かりません"),
    "a value after the end": (recursion(own_value_after_the_end), "最後のトークンの後の価値は 0"),
    "forward": (recursion(td, forward=True), "向きが逆"),
    "gradient": (recursion(td, detach=False), "勾配が流れています"),
    "returns without the value": (
        recursion(td, returns_of=lambda A, V: A), "returns は Â + V"),
    "returns less the value": (
        recursion(td, returns_of=lambda A, V: A - V), "returns は Â + V"),
}  # fmt: skip
# What γ = 1 hides: only the hidden tests see it.
WRONG_DISCOUNTS = {
    "no gamma before lambda": recursion(td, lambda gamma, lam: lam),
    "no gamma on the value after": recursion(lambda r, V, after, gamma, lam: r + after - V),
    "gamma twice": recursion(td, lambda gamma, lam: gamma**2 * lam),
}


@pytest.mark.parametrize("name", RIGHT_GAE)
def test_right_gaes_pass(notebook, grade, name):
    assert grade(notebook, {"gae": RIGHT_GAE[name], **QUICK}).failed == set()


@pytest.mark.parametrize("name", WRONG_GAE)
def test_wrong_gaes_are_rejected_and_the_visible_tests_say_why(notebook, grade, name):
    gae, hint = WRONG_GAE[name]
    answers = {"gae": gae, **QUICK}
    caught = grade(notebook, answers).failed
    assert caught and caught <= GAE_TESTS
    if name != "gradient":  # what carries a gradient is visible
        assert grade(notebook, answers, part="hidden").failed & GAE_TESTS
    seen = grade(notebook, answers, part="visible")
    assert any(hint in str(seen[cell]) for cell in seen.failed), seen


@pytest.mark.parametrize("name", WRONG_DISCOUNTS)
def test_wrong_discounts_are_rejected(notebook, grade, name):
    answers = {"gae": WRONG_DISCOUNTS[name], **QUICK}
    assert grade(notebook, answers).failed == GAE_TESTS


# The policy's loss


def by_tokens(logps, old, advantages, mask, epsilon):
    total, count = 0.0, 0
    for i, t in mask.nonzero().tolist():
        w = (logps[i, t] - old[i, t].detach()).exp()
        A = advantages[i, t].item()
        total = total + torch.minimum(w * A, w.clamp(1 - epsilon, 1 + epsilon) * A)
        count += 1
    return -total / count


def as_a_maximum(logps, old, advantages, mask, epsilon):
    real = mask.bool()
    x, o, A = logps[real], old[real].detach(), advantages[real].detach()
    return torch.maximum(
        -A * (x - o).exp(), -A * torch.clip((x - o).exp(), 1 - epsilon, 1 + epsilon)
    ).mean()


def one_sided(logps, old, advantages, mask, epsilon):
    """min{wA, (1 ± ε)A} with the sign of A: the same function, as in the implementation of 2017."""
    real = mask.bool()
    x, o, A = logps[real], old[real].detach(), advantages[real].detach()
    bound = torch.where(A >= 0, (1 + epsilon) * A, (1 - epsilon) * A)
    return -torch.minimum((x - o).exp() * A, bound).mean()


RIGHT_LOSSES = {
    "token by token": by_tokens,
    "maximum of the losses": as_a_maximum,
    "one bound": one_sided,
    "the package's": losses.ppo_policy_loss,
}


def masked(objective_of, reduce=None, *, detach=(True, True)):
    """−reduce(objective) of x, o, A with the padding at 0; reduce(objective, mask)."""

    def loss(logps, old, advantages, mask, epsilon):
        real = mask.bool()
        old = old.detach() if detach[0] else old
        advantages = advantages.detach() if detach[1] else advantages
        x, o, A = (torch.where(real, y, 0.0) for y in (logps, old, advantages))
        objective = objective_of(x, o, A, epsilon)
        if reduce is None:
            return -objective.sum() / real.sum()
        return -reduce(torch.where(real, objective, 0.0), real)

    return loss


def sign_of_the_advantage(x, o, A, epsilon):
    low, high = (clipped_objective(x, o, A, epsilon, pick) for pick in (torch.minimum,
                                                                        torch.maximum))
    return torch.where(A >= 0, low, high)


def clip_only(x, o, A, epsilon):
    return (x - o).exp().clamp(1 - epsilon, 1 + epsilon) * A


def without_mask(logps, old, advantages, mask, epsilon):
    return -clipped_objective(logps, old.detach(), advantages.detach(), epsilon).mean()


# name -> (loss, what the visible tests say about it)
WRONG_LOSSES = {
    "max": (masked(lambda x, o, A, e: clipped_objective(x, o, A, e, torch.maximum)), "max に"),
    "sign of the advantage": (masked(sign_of_the_advantage), "A の符号で"),
    "no clip": (masked(lambda x, o, A, e: (x - o).exp() * A), "クリッピングが効いていません"),
    "clip only": (masked(clip_only), "min をとっていない"),
    "sign": (masked(lambda *a: -clipped_objective(*a)), "符号が逆"),
    "ratio turned around": (
        masked(lambda x, o, A, e: clipped_objective(o, x, A, e)), "比の向きが逆"),
    "log-ratio for the ratio": (
        masked(lambda x, o, A, e: torch.minimum((x - o) * A, (x - o).clamp(1 - e, 1 + e) * A)),
        "対数確率の差のまま"),
    "mean of the rows' means": (
        masked(clipped_objective, lambda y, m: (y.sum(-1) / m.sum(-1)).mean()), "行ごとに平均"),
    "sum": (masked(clipped_objective, lambda y, m: y.sum()), "合計"),
    "mean over rows": (masked(clipped_objective, lambda y, m: y.sum() / len(y)), "行の数で割って"),
    "mean over the padded width": (
        masked(clipped_objective, lambda y, m: y.mean()), "詰め物も数えて"),
    "no mask": (without_mask, "詰め物の値が混ざって"),
    "gradient through the old policy": (
        masked(clipped_objective, detach=(False, True)), "古い方策に勾配"),
    "gradient through the advantages": (
        masked(clipped_objective, detach=(True, False)), "アドバンテージに勾配"),
    "policy detached": (
        masked(lambda x, o, A, e: clipped_objective(x.detach(), o, A, e)), "does not require grad"),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT_LOSSES)
def test_right_losses_pass(notebook, grade, name):
    answers = {"ppo_policy_loss": RIGHT_LOSSES[name], **QUICK}
    assert grade(notebook, answers).failed == set()


@pytest.mark.parametrize("name", WRONG_LOSSES)
def test_wrong_losses_are_rejected_and_the_visible_tests_say_why(notebook, grade, name):
    loss, hint = WRONG_LOSSES[name]
    answers = {"ppo_policy_loss": loss, **QUICK}
    caught = grade(notebook, answers).failed
    assert caught and caught <= LOSS_TESTS
    if "advantages" not in name:  # what carries a gradient is visible
        assert grade(notebook, answers, part="hidden").failed & LOSS_TESTS
    seen = grade(notebook, answers, part="visible")
    assert any(hint in str(seen[cell]) for cell in seen.failed), seen


def test_a_clip_of_the_log_ratio_is_rejected(notebook, grade):
    # clip(log w, ±ε) is close to the right one, but not it
    def nearly(x, o, A, epsilon):
        kept = (x - o).clamp(-epsilon, epsilon).exp()
        return torch.minimum((x - o).exp() * A, kept * A)

    assert grade(notebook, {"ppo_policy_loss": masked(nearly), **QUICK}).failed >= {
        "test_four_cases"}


# The planted bug


def names_of(notebook, *cells):
    names = {}
    for cell in notebook.cells:
        if cell.id in ("imports", "helpers", "buggy_policy_loss", "show_identities", *cells):
            exec(cell.source, names)
    return names


def test_exactly_one_identity_fails_for_the_planted_bug(notebook):
    names = names_of(notebook, "ppo_policy_loss")

    def off(loss, w, A):
        return [abs(left - right) > 1e-6 for _, left, right in names["identities"](loss, w, A)]

    for w in (0.4, 0.9, 1.5, 3.0):
        assert off(names["buggy_policy_loss"], w, 1.0) == [False] * 3
        for A in (1.0, -1.0, -2.5):
            assert off(names["ppo_policy_loss"], w, A) == [False] * 3
    assert off(names["buggy_policy_loss"], 1.5, -1.0) == [False, False, True]
    assert off(names["buggy_policy_loss"], 2.0, -1.0) == [False, False, True]


@pytest.mark.parametrize(
    "number, left", [(1, 2.0), (2, 2.0), (3, 1.2), (3, 1.5), (3, -2.0), (3, 2.4), (3, math.nan)]
)
def test_a_wrong_diagnosis_is_rejected(notebook, grade, number, left):
    answer = dict(failed_identity=number, left_side=left)
    assert grade(notebook, {"failed_identity": answer, **QUICK}).failed == {"test_failed_identity"}


@pytest.mark.parametrize(
    "wrong",
    [
        masked(sign_of_the_advantage),
        masked(lambda x, o, A, e: clipped_objective(x, o, A, e, torch.maximum)),
        masked(lambda x, o, A, e: (x - o).exp() * A),
        masked(clip_only),
        masked(lambda x, o, A, e: clipped_objective(x, o, A, 0.2)),
        masked(clipped_objective, lambda y, m: y.mean()),
    ],
    ids=["unchanged", "max", "no clip", "clip only", "epsilon written in", "padded width"],
)
def test_a_wrong_repair_is_rejected(notebook, grade, wrong):
    answers = {"repaired_policy_loss": wrong, **QUICK}
    assert grade(notebook, answers).failed == {"test_repaired"}


@pytest.mark.parametrize("name", RIGHT_LOSSES)
def test_a_right_repair_passes_in_any_form(notebook, grade, name):
    answers = {"repaired_policy_loss": RIGHT_LOSSES[name], **QUICK}
    assert grade(notebook, answers).failed == set()


# Predictions and training


@pytest.mark.parametrize(
    "half, sure, wrong",
    [
        (0.6, 1.0, set()),
        (torch.tensor(0.6), 1, set()),
        (0.605, 0.99, set()),
        (1.0, 1.0, {"test_predicted_half"}),
        (0.7, 1.0, {"test_predicted_half"}),
        (0.55, 1.0, {"test_predicted_half"}),
        (0.4, 1.0, {"test_predicted_half"}),
        (0.6, 0.92, {"test_predicted_sure"}),
        (0.6, 0.9, {"test_predicted_sure"}),
        (0.6, 1.08, {"test_predicted_sure"}),
    ],
)
def test_predictions(notebook, grade, half, sure, wrong):
    answer = dict(predicted_half=half, predicted_sure=sure)
    assert grade(notebook, {"predictions": answer, **QUICK}).failed == wrong


def test_a_training_with_the_package_passes(notebook, grade):
    def loss_of(x, o, A, epsilon):
        return losses.ppo_policy_loss(x[None], o[None], A[None], torch.ones(1, 2), epsilon)

    assert grade(notebook, {"trained_policy": train(loss_of)}).failed == set()


@pytest.mark.parametrize(
    "wrong",
    [
        train(lambda x, o, A, e: -((x - o).exp() * A).mean()),
        train(lambda x, o, A, e: -clipped_objective(x, o, A, e, torch.maximum).mean()),
        train(lambda x, o, A, e: -sign_of_the_advantage(x, o, A, e).mean()),
        train(lambda x, o, A, e: clipped_objective(x, o, A, e).mean()),
        train(lambda x, o, A, e: -(x * A).mean()),
        train(lambda x, o, A, e: -clipped_objective(x, o, A, 0.2).mean()),
        train(lambda x, o, A, e: -clipped_objective(x, o, A, e)[0]),
        lambda old_probs, epsilon, advantages=None: torch.tensor([0.6, 0.4]),
    ],
    ids=["no clip", "max", "sign", "ascent", "no ratio", "epsilon written in", "A only",
         "one number"],
)  # fmt: skip
def test_wrong_trainings_are_rejected(notebook, grade, wrong):
    assert grade(notebook, {"trained_policy": wrong}).failed == {"test_trained_policy"}
