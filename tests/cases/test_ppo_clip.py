"""Inputs that broke other implementations of GAE and of PPO's clip, with their right values."""

import copy
import math

import pytest
import torch

from companion.lm import load
from companion.losses import gae, kl_penalized_rewards, ppo_policy_loss, ppo_value_loss, whiten
from companion.oracle import HAS_PPO, trl_ppo
from companion.training import new_reward_model

F64 = torch.float64
needs_ppo = pytest.mark.skipif(not HAS_PPO, reason="this TRL has no PPOTrainer")


def t(*values):
    return torch.tensor(values, dtype=F64)


def one_token(ratio, advantage, epsilon=0.2):
    """The objective of one token, and its slope in log w."""
    log_w = t([ratio]).log().requires_grad_()
    objective = -ppo_policy_loss(log_w, t([0.0]), t([advantage]), t([1.0]), epsilon)
    return objective.item(), torch.autograd.grad(objective, log_w)[0].item()


# The clip.


@pytest.mark.parametrize(
    "ratio, advantage, objective, slope",
    [(1.5, 1.0, 1.2, 0.0), (1.5, -1.0, -1.5, -1.5), (0.5, 1.0, 0.5, 0.5), (0.5, -1.0, -0.8, 0.0)],
)
def test_the_four_cases(ratio, advantage, objective, slope):
    # max for min swaps which two have a gradient; min and max by the sign of A give −1.2, 0 for
    # the second and −.5, −.5 for the fourth
    assert one_token(ratio, advantage) == pytest.approx((objective, slope), abs=1e-12)


@pytest.mark.parametrize("ratio", [0.01, 0.5, 0.85, 1.0, 1.15, 1.5, 100.0])
@pytest.mark.parametrize("advantage", [-3.0, -0.1, 0.0, 0.1, 3.0])
def test_the_objective_never_exceeds_the_unclipped_one(ratio, advantage):
    assert one_token(ratio, advantage)[0] <= ratio * advantage + 1e-12


@pytest.mark.parametrize("epsilon", [1e-6, 0.2, 0.9])
def test_before_the_first_update_epsilon_is_inert(epsilon):
    logps = t([-1.0, -2.0, -0.5], [-3.0, -0.1, 7.0]).requires_grad_()
    advantages, mask = t([1.0, -2.0, 0.5], [0.0, 3.0, 9.0]), t([1, 1, 1], [1, 1, 0])
    ppo_policy_loss(logps, logps.detach(), advantages, mask, epsilon).backward()
    expected = [[-0.2, 0.4, -0.1], [0.0, -0.6, 0.0]]
    assert logps.grad.tolist() == [pytest.approx(row, abs=1e-12) for row in expected]


def test_a_large_first_step_leaves_the_interval_and_nothing_pulls_it_back():
    logits = t(0.0, 0.0).requires_grad_()
    old = logits.detach().log_softmax(0)[None]

    def slope():
        logps = logits.log_softmax(0)[None]
        loss = ppo_policy_loss(logps, old, t([1.0, -1.0]), torch.ones(1, 2), 0.2)
        return torch.autograd.grad(loss, logits)[0]

    step = slope()
    with torch.no_grad():
        logits -= 6 * step
    ratios = (logits.log_softmax(0) - old[0]).exp()
    assert ratios[0] > 1.8 and ratios[1] < 0.2 and not slope().any()


def test_an_action_that_is_likely_already_is_never_clipped_above():
    # π_old = .9: the ratio is at most 1/.9 = 1.11
    assert one_token(1 / 0.9, 1.0)[1] == pytest.approx(1 / 0.9)
    assert one_token(1 / 0.8, 1.0)[1] == 0


@pytest.mark.bad_input
def test_a_log_ratio_that_overflows_and_one_that_is_infinite():
    huge = torch.tensor([[0.0, 89.0]])
    kept = ppo_policy_loss(huge, torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2), 0.2)
    assert kept.item() == pytest.approx(-1.1)
    with pytest.raises(ValueError, match=r"\[0, 1\] is 89.*overflows"):
        ppo_policy_loss(huge, torch.zeros(1, 2), -torch.ones(1, 2), torch.ones(1, 2), 0.2)
    with pytest.raises(ValueError, match=r"logps\[0, 1\] is -inf"):
        ppo_policy_loss(
            t([0.0, -math.inf]), t([0.0, 0.0]), t([1.0, 1.0]), torch.ones(1, 2), 0.2)


# GAE.


@pytest.mark.parametrize("filler", [2.0, 1e6, math.nan])
def test_a_pad_with_a_value_changes_nothing(filler):
    rewards, values = t([0.0, 0.0, 1.0, filler]), t([0.5, 0.6, 0.7, filler])
    advantages, returns = gae(rewards, values, t([1, 1, 1, 0]), 1.0, 0.95)
    assert advantages[0].tolist() == pytest.approx([0.46575, 0.385, 0.3, 0], abs=1e-12)
    assert returns[0].tolist() == pytest.approx([0.96575, 0.985, 1, 0], abs=1e-12)


def test_without_its_mask_every_advantage_is_another():
    rewards, values = t([0.0, 0.0, 1.0, 0.0]), t([0.5, 0.6, 0.7, 2.0])
    whole, _ = gae(rewards, values, torch.ones(1, 4), 1.0, 0.95)
    # δ = .1, .1, 1 + 2 − .7, −2
    last = 2.3 - 0.95 * 2
    expected = [0.1 + 0.95 * (0.1 + 0.95 * last), 0.1 + 0.95 * last, last, -2.0]
    assert whole[0].tolist() == pytest.approx(expected, abs=1e-12)
    assert min(abs(a - b) for a, b in zip(expected, [0.46575, 0.385, 0.3], strict=False)) > 0.05


def test_the_score_on_the_last_token_or_one_slot_later():
    advantages, _ = gae(t([0.0, 0.0, 1.0]), t([0.5, 0.6, 0.7]), torch.ones(1, 3))
    assert advantages[0, 2].item() == pytest.approx(0.3)
    later, _ = gae(t([0.0, 0.0, 0.0, 1.0]), t([0.5, 0.6, 0.7, 0.7]), torch.ones(1, 4))
    assert later[0, 2].item() == pytest.approx(0.285)


def test_a_piece_cut_from_a_longer_episode_needs_the_value_after_the_cut():
    rewards, values = t([1.0, -0.5, 2.0, 0.5]), t([0.3, 0.9, -0.4, 0.8])
    whole, _ = gae(rewards, values, torch.ones(1, 4), 0.9, 0.0)
    piece = rewards[:, :2].clone()
    lost, _ = gae(piece, values[:, :2], torch.ones(1, 2), 0.9, 0.0)
    piece[0, 1] += 0.9 * values[0, 2]  # γ·V_T
    kept, _ = gae(piece, values[:, :2], torch.ones(1, 2), 0.9, 0.0)
    assert kept[0].tolist() == pytest.approx(whole[0, :2].tolist(), abs=1e-12)
    assert lost[0, 1].item() == pytest.approx(whole[0, 1].item() + 0.36, abs=1e-12)


# Whitening.


@pytest.mark.parametrize("mask", [[0, 0, 0], [1, 0, 0]])
def test_fewer_than_two_tokens_whiten_to_0_and_teach_nothing(mask):
    mask = torch.tensor([mask])
    white = whiten(t([3.0, 4.0, 5.0]), mask)
    assert not white.any()
    logps = t([-1.0, -1.0, -1.0]).requires_grad_()
    ppo_policy_loss(logps, logps.detach(), white, mask, 0.2).backward()
    assert not logps.grad.any()


def test_whitening_makes_a_small_positive_advantage_negative():
    white = whiten(t([1.0, 2.0, 3.0, 99.0]), t([1, 1, 1, 0]))
    assert white[0].tolist() == pytest.approx([-1, 0, 1, 0], abs=1e-7)


def test_equal_advantages_whiten_to_0():
    white = whiten(torch.full((2, 3), 0.7, dtype=F64), torch.ones(2, 3))
    assert white.abs().max() < 1e-10


# Token means.


def test_the_token_mean_is_not_the_mean_of_the_rows_means():
    advantages, mask = t([-1.0, 9.0, 9.0], [-3.0, -3.0, -3.0]), t([1, 0, 0], [1, 1, 1])
    zeros = torch.zeros(2, 3, dtype=F64)
    both = [ppo_policy_loss(zeros[:1], zeros[:1], *x, 0.2) for x in (
        (advantages[:1], mask[:1]), (advantages[1:], mask[1:]))]
    assert ppo_policy_loss(zeros, zeros, advantages, mask, 0.2).item() == pytest.approx(2.5)
    assert sum(both).item() / 2 == pytest.approx(2.0)


def test_a_fully_masked_batch_has_loss_0_and_a_finite_gradient():
    logps = t([-1.0, math.nan]).requires_grad_()
    loss = ppo_policy_loss(logps, t([0.0, 0.0]), t([1.0, math.nan]), t([0, 0]), 0.2)
    loss.backward()
    assert loss.item() == 0 and logps.grad.tolist() == [[0, 0]]


# What TRL does around the equation.


@pytest.fixture(scope="module")
def ask():
    model, tokenizer = load("prime-sums", dtype=F64)

    reference = copy.deepcopy(model)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in reference.parameters():
            p += 0.2 * p.std() * torch.randn(p.shape, generator=g).to(p)
    heads = [new_reward_model("prime-sums", seed=seed).double() for seed in (2, 3)]
    limits = (20, 30, 5, 100, 7, 64, 99, 12)
    prompts = tokenizer([f"{n}未満の素数の合計は？" for n in limits])["input_ids"]

    def run(**config):
        settings = dict(
            num_ppo_epochs=1, response_length=4, temperature=1.0, learning_rate=1e-3, kl_coef=0.05)
        return trl_ppo(model, reference, *heads, prompts, tokenizer, **(settings | config))

    return run


@pytest.fixture(scope="module")
def run(ask):
    return ask()


@needs_ppo
def test_trl_whitens_the_advantages_untold(run):
    raw = (run.returns - run.values)[run.mask]
    white = run.advantages[run.mask]
    assert white.mean().abs() < 1e-12 and white.std().item() == pytest.approx(1, abs=1e-6)
    assert (raw.std() - 1).abs() > 0.005


@needs_ppo
def test_trls_score_one_slot_later_gives_another_advantage_at_eos(run):
    ours, _ = gae(
        kl_penalized_rewards(run.scores, run.logps.to(F64), run.ref_logps, run.mask, 0.05),
        torch.where(run.mask, run.values, 0.0), run.mask)  # fmt: skip
    theirs = run.returns - run.values
    ended = (run.mask.sum(-1) < run.mask.shape[1]).nonzero()[:, 0]
    assert len(ended) > 1
    for row in ended.tolist():
        last = run.mask[row].sum().item() - 1
        score, before, after = run.scores[row], run.values[row, last], run.values[row, last + 1]
        penalty = run.kl_rewards[row, last]
        textbook = penalty + score - before
        shifted = penalty + after - before + 0.95 * (score - after)
        assert ours[row, last].item() == pytest.approx(textbook.item(), abs=1e-6)
        assert theirs[row, last].item() == pytest.approx(shifted.item(), abs=1e-12)
        assert (textbook - shifted).item() == pytest.approx(0.05 * (score - after).item(), abs=1e-6)


@needs_ppo
def test_trls_value_loss_counts_for_a_tenth(run):
    update = run.updates[0]
    values = update.values.clone().requires_grad_()
    ppo_value_loss(
        values, update.old_values, update.returns, update.value_mask, 0.2).backward()
    gap = (0.1 * values.grad - update.values_gradient).abs().max()
    assert gap < 1e-12 and update.values_gradient.abs().max() > 1e-4


@needs_ppo
def test_trls_token_mean_is_over_the_micro_batch(ask):
    first, second = ask(per_device_train_batch_size=4, gradient_accumulation_steps=2).updates
    tokens = first.mask.sum().item()
    assert tokens != second.mask.sum().item()
    expected = -first.advantages[first.mask] / (2 * tokens)  # the ratio is 1
    gap = (first.logps_gradient[first.mask] - expected).abs().max()
    assert gap < 1e-6 < expected.abs().max()


@needs_ppo
def test_trls_first_ratio_is_1_to_float32_only(run):
    update = run.updates[0]
    gap = (update.logps - update.old_logps.to(F64))[update.mask].abs().max().item()
    assert update.old_logps.dtype == torch.float32 and 0 < gap < 1e-5
