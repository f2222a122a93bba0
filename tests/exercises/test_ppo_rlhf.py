"""4.4.3 RLHF by PPO: what the exercise's tests accept and reject."""

import functools
import math

import pytest
import torch

import exercises
from companion import losses

SOURCE = exercises.SOURCES / "4.4.3-ppo-rlhf.py"
REWARD_TESTS = {"test_penalty", "test_score", "test_mask"}
VALUE_TESTS = {"test_value", "test_value_batch", "test_value_gradient"}


# Question 1.1, the rewards of (4.10).


def spread_over(place, penalty=lambda x, r: x - r):
    """Rewards whose score stands where place(mask), one or zero a slot, says."""

    def rewards(scores, logps, ref_logps, mask, beta):
        kl = torch.where(mask, penalty(logps, ref_logps), 0.0)
        return (-beta * kl + place(mask) * scores[:, None]).detach()

    return rewards


def last_place(mask):
    after = torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], -1)
    return (mask & ~after).double()


def late_place(mask):
    """One slot after the last token where there is one, as TRL does it."""
    slots = torch.minimum(mask.sum(-1), torch.tensor(mask.shape[1] - 1))
    return torch.nn.functional.one_hot(slots, mask.shape[1]).double()


def slot(index):
    def place(mask):
        places = torch.zeros(mask.shape, dtype=torch.float64)
        places[:, index] = 1.0
        return places

    return place


def row_by_row(scores, logps, ref_logps, mask, beta):
    result = torch.zeros_like(logps)
    for i, T in enumerate(mask.sum(-1).tolist()):
        for t in range(T):
            result[i, t] = -beta * (logps[i, t] - ref_logps[i, t]).item()
        result[i, T - 1] += scores[i].item()
    return result.detach()


RIGHT_REWARDS = {
    "row by row": row_by_row,
    "where the mask ends": spread_over(last_place),
    "the package's": losses.kl_penalized_rewards,
}
# name -> (rewards, what the visible tests say about it)
WRONG_REWARDS = {
    "sign": (spread_over(last_place, lambda x, r: r - x), "符号が逆"),
    "no reference": (spread_over(last_place, lambda x, r: x), "引かれていない"),
    "k3": (spread_over(last_place, lambda x, r: torch.expm1(r - x) - (r - x)), "k3"),
    "k3, turned around": (
        spread_over(last_place, lambda x, r: torch.expm1(x - r) - (x - r)), "逆向き"),
    "k2": (spread_over(last_place, lambda x, r: (x - r) ** 2 / 2), "見比べて"),
    "no beta": (
        lambda s, x, r, mask, beta: spread_over(last_place)(s, x, r, mask, 1.0),
        "β が掛かっていない"),
    "score at the padded end": (spread_over(slot(-1)), "詰め物まで数えた"),
    "score one slot late": (spread_over(late_place), "一つ後ろ"),
    "score at the first token": (spread_over(slot(0)), "最初のトークン"),
    "score at every token": (spread_over(lambda mask: mask.double()), "すべてのトークン"),
    "no score": (spread_over(lambda mask: 0.0 * mask), "足されていません"),
    "no mask": (
        lambda s, x, r, mask, beta: (-beta * (x - r) + last_place(mask) * s[:, None]).detach(),
        "詰め物"),
    "with gradient": (
        lambda s, x, r, mask, beta: torch.where(mask, -beta * (x - r), 0.0)
        + last_place(mask) * s[:, None], "勾配が流れています"),
    "KL twice": (
        lambda s, x, r, mask, beta: spread_over(last_place)(
            s - beta * ((x - r) * mask).sum(-1).detach(), x, r, mask, beta), "見比べて"),
    "a number a row": (
        lambda s, x, r, mask, beta: (s - beta * ((x - r) * mask).sum(-1)).detach(), "形状"),
}  # fmt: skip


# Question 1.2, the value's loss.


def token_mean(terms, mask):
    return torch.where(mask, terms, 0.0).sum() / mask.sum()


def clipped_to(values, centre, epsilon):
    centre = centre.detach()
    return torch.minimum(torch.maximum(values, centre - epsilon), centre + epsilon)


def value_loss(pick=torch.maximum, mean=token_mean, power=2, half=0.5, centre=lambda old, R: old):
    def loss(values, old_values, returns, mask, epsilon):
        target = returns.detach()
        clipped = clipped_to(values, centre(old_values, target), epsilon)
        errors = (values - target).abs() ** power, (clipped - target).abs() ** power
        return half * mean(pick(*errors), mask)

    return loss


def token_by_token(values, old_values, returns, mask, epsilon):
    terms = []
    for i, t in mask.nonzero().tolist():
        old, R = old_values[i, t].item(), returns[i, t].item()
        near = values[i, t].clamp(old - epsilon, old + epsilon)
        terms.append(max((values[i, t] - R) ** 2, (near - R) ** 2))
    return sum(terms) / (2 * len(terms))


def by_where(values, old_values, returns, mask, epsilon):
    """The same without a maximum: the clipped error where it is the larger."""
    old, R = old_values.detach(), returns.detach()
    plain, near = values - R, old + (values - old).clamp(-epsilon, epsilon) - R
    return (torch.where(near.abs() > plain.abs(), near, plain)[mask] ** 2).mean() / 2


RIGHT_LOSSES = {
    "token by token": token_by_token,
    "where": by_where,
    "minimum of maximum": value_loss(),
    "the package's": losses.ppo_value_loss,
}
WRONG_LOSSES = {
    "minimum": (value_loss(torch.minimum), "小さいほう"),
    "no clip": (value_loss(lambda plain, _: plain), "クリッピングがない"),
    "clipped only": (value_loss(lambda _, near: near), "大きいほう"),
    "no half": (value_loss(half=1.0), "1/2"),
    "minimum, no half": (value_loss(torch.minimum, half=1.0), "1/2 も"),
    "absolute error": (value_loss(power=1), "2 乗"),
    "around the target": (value_loss(centre=lambda old, R: R), "クリッピングがない"),
    "mean of rows": (
        value_loss(mean=lambda x, m: ((x * m).sum(-1) / m.sum(-1)).mean()), "回答ごとに平均"),
    "sum": (value_loss(mean=lambda x, m: (x * m).sum()), "合計"),
    "mean over the padding": (value_loss(mean=lambda x, m: (x * m).mean()), "詰め物まで"),
    "no mask": (value_loss(mean=lambda x, m: x.mean()), "マスクが使われていない"),
    "no mean": (value_loss(mean=lambda x, m: x * m), "スカラー"),
    "gradient through the old values": (
        lambda V, old, R, m, e: 0.5 * token_mean(torch.maximum(
            (V - R.detach()) ** 2,
            (torch.minimum(torch.maximum(V, old - e), old + e) - R.detach()) ** 2), m),
        "前の価値に勾配"),
    "gradient through the target": (
        lambda V, old, R, m, e: 0.5 * token_mean(torch.maximum(
            (V - R) ** 2, (clipped_to(V, old, e) - R) ** 2), m), "目標に勾配"),
    "value detached": (
        lambda V, old, R, m, e: value_loss()(V.detach(), old, R, m, e), "does not require grad"),
}  # fmt: skip


# In the place of question 3's training, where another question is at stake: trained once.


def climb(objective_of):
    """A trained_policy that maximizes objective_of(logps, ref_logps, scores, beta)."""

    def trained_policy(scores, ref_probs, beta, steps=400):
        scores, ref_logps = (torch.tensor(x, dtype=torch.float64) for x in (scores, ref_probs))
        ref_logps = ref_logps.log()
        logits = ref_logps.clone().requires_grad_()
        optimizer = torch.optim.Adam([logits], lr=0.05)
        history = []
        for _ in range(steps):
            objective = objective_of(logits.log_softmax(0), ref_logps, scores, beta)
            optimizer.zero_grad()
            (-objective).backward()
            optimizer.step()
            history.append(objective.item())
        return logits.softmax(0).detach(), history[-1] - history[0]

    return trained_policy


RIGHT_TRAINING = climb(lambda x, ref, r, beta: (x.exp() * (r - beta * (x - ref))).sum())
QUICK = {"trained_policy": functools.cache(RIGHT_TRAINING)}


@pytest.mark.parametrize("name", RIGHT_REWARDS)
def test_right_rewards_pass_everything(notebook, grade, name):
    results = grade(notebook, {"kl_penalized_rewards": RIGHT_REWARDS[name], **QUICK})
    assert results.failed == set(), results


@pytest.mark.parametrize("name", WRONG_REWARDS)
def test_wrong_rewards_are_rejected_and_the_visible_tests_say_why(notebook, grade, name):
    rewards, hint = WRONG_REWARDS[name]
    answers = {"kl_penalized_rewards": rewards, **QUICK}
    assert grade(notebook, answers, part="hidden").failed & REWARD_TESTS
    seen = grade(notebook, answers, part="visible")
    assert seen.failed <= REWARD_TESTS
    assert any(hint in str(seen[cell]) for cell in seen.failed), seen


@pytest.mark.parametrize("name", RIGHT_LOSSES)
def test_right_losses_pass_everything(notebook, grade, name):
    results = grade(notebook, {"ppo_value_loss": RIGHT_LOSSES[name], **QUICK})
    assert results.failed == set(), results


@pytest.mark.parametrize("name", WRONG_LOSSES)
def test_wrong_losses_are_rejected_and_the_visible_tests_say_why(notebook, grade, name):
    loss, hint = WRONG_LOSSES[name]
    answers = {"ppo_value_loss": loss, **QUICK}
    assert grade(notebook, answers, part="hidden").failed & VALUE_TESTS
    seen = grade(notebook, answers, part="visible")
    assert seen.failed <= VALUE_TESTS
    assert any(hint in str(seen[cell]) for cell in seen.failed), seen


# Question 2.


def test_exactly_one_identity_fails_for_the_planted_bug(notebook):
    names = {}
    for cell in notebook.cells:
        if cell.id in ("imports", "buggy_rewards", "show_identities", "kl_penalized_rewards"):
            exec(cell.source, names)

    def off(rewards, beta):
        return [abs(left - right) > 1e-6 for _, left, right in names["identities"](rewards, beta)]

    assert off(names["buggy_rewards"], 0.0) == [False, False, False]
    for beta in (0.1, 0.5, 2.0):
        assert off(names["buggy_rewards"], beta) == [False, True, False]
        assert off(names["kl_penalized_rewards"], beta) == [False, False, False]


@pytest.fixture(scope="module")
def left_side(notebook):
    names = {}
    for cell in notebook.cells:
        if cell.id in ("imports", "buggy_rewards", "show_identities"):
            exec(cell.source, names)
    return names["identities"](names["buggy_rewards"], 0.5)[1][1]


@pytest.mark.parametrize(
    "number, shift, beta",
    [(1, 0.0, 1.0), (3, 0.0, 1.0), (2, 0.3, 1.0), (2, math.nan, 1.0), (2, 0.0, 2.0),
     (2, 0.0, 0.25), (2, 0.0, 0.5), (2, 0.0, 0.0)],
)  # fmt: skip
def test_a_wrong_diagnosis_is_rejected(notebook, grade, left_side, number, shift, beta):
    answer = dict(failed_identity=number, left_side=left_side + shift, actual_beta=beta)
    assert grade(notebook, {"failed_identity": answer, **QUICK}).failed == {"test_failed_identity"}


def test_a_right_diagnosis_passes_as_it_was_read_off(notebook, grade, left_side):
    answer = dict(failed_identity=2, left_side=round(left_side, 3), actual_beta=1)
    assert grade(notebook, {"failed_identity": answer, **QUICK}).failed == set()


@pytest.mark.parametrize("name", RIGHT_REWARDS)
def test_a_right_repair_passes_in_any_form(notebook, grade, name):
    answers = {"repaired_rewards": RIGHT_REWARDS[name], **QUICK}
    assert grade(notebook, answers).failed == set()


@pytest.mark.parametrize(
    "wrong",
    [
        WRONG_REWARDS["KL twice"][0],
        WRONG_REWARDS["sign"][0],
        WRONG_REWARDS["score one slot late"][0],
        lambda s, x, r, mask, beta: spread_over(last_place)(
            s - beta * ((x - r) * mask).sum(-1), x, r, mask, 0.0),
        lambda s, x, r, mask, beta: spread_over(last_place)(s, x, r, mask, 0.5 * beta),
    ],
    ids=["unchanged", "sign", "score late", "all on the last token", "half of beta"],
)  # fmt: skip
def test_a_wrong_repair_is_rejected(notebook, grade, wrong):
    assert grade(notebook, {"repaired_rewards": wrong, **QUICK}).failed == {"test_repaired"}


# Question 3.


@pytest.mark.parametrize(
    "prob, gain, wrong",
    [
        (0.343, 0.2675, set()),
        (torch.tensor(0.343), 0.268, set()),
        (0.6652, 0.2675, {"test_predicted_prob"}),
        (1.0, 0.2675, {"test_predicted_prob"}),
        (0.1, 0.2675, {"test_predicted_prob"}),
        (34.3, 0.2675, {"test_predicted_prob"}),
        (0.343, 0.7675, {"test_predicted_gain"}),
        (0.343, -0.2675, {"test_predicted_gain"}),
        (0.343, 0.5, {"test_predicted_gain"}),
    ],
)
def test_predictions(notebook, grade, prob, gain, wrong):
    answer = dict(predicted_prob=prob, predicted_gain=gain)
    assert grade(notebook, {"predictions": answer, **QUICK}).failed == wrong


def by_formula(scores, ref_probs, beta):
    r, ref = (torch.tensor(x, dtype=torch.float64) for x in (scores, ref_probs))
    weights = ref * (r / beta).exp()
    return weights / weights.sum(), (beta * weights.sum().log() - ref @ r).item()


@pytest.mark.parametrize(
    "right",
    [
        RIGHT_TRAINING,
        climb(lambda x, ref, r, beta: x.exp() @ r - beta * torch.nn.functional.kl_div(
            ref, x, log_target=True, reduction="sum")),
        by_formula,
    ],
    ids=["as in the book", "kl_div", "closed form"],
)  # fmt: skip
def test_right_trainings_pass(notebook, grade, right):
    assert grade(notebook, {"trained_policy": right}).failed == set()


@pytest.mark.parametrize(
    "wrong",
    [
        climb(lambda x, ref, r, beta: (x.exp() * r).sum()),
        climb(lambda x, ref, r, beta: (x.exp() * (r - (x - ref))).sum()),
        climb(lambda x, ref, r, beta: (x.exp() * (r - beta * x)).sum()),
        climb(lambda x, ref, r, beta: (x.exp() * (r - 2 * beta * (x - ref))).sum()),
        climb(lambda x, ref, r, beta: (x.exp() * r).sum() - beta * (ref.exp() * (ref - x)).sum()),
        climb(lambda x, ref, r, beta: (
            x.exp() * (r - beta * (torch.expm1(ref - x) - (ref - x)).detach())).sum()),
        lambda *_, **__: (torch.tensor([0.2785, 0.3785, 0.3430]), 0.2675),
    ],
    ids=["no KL", "no beta", "no reference", "KL twice", "the other KL", "k3 as data", "numbers"],
)
def test_wrong_trainings_are_rejected(notebook, grade, wrong):
    assert grade(notebook, {"trained_policy": wrong}).failed == {"test_trained_policy"}
