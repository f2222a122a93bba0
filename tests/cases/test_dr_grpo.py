"""Inputs that broke other implementations of Dr. GRPO, with their right values."""

import copy
import math

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from companion.exact import World, expect
from companion.lm import checkpoint, load, token_log_probs
from companion.losses import (
    dapo_loss,
    degenerate_groups,
    dr_grpo_loss,
    group_advantages,
    grpo_loss,
    kl_k3,
)
from companion.oracle import trl_grpo
from companion.rewards import exact_match
from companion.tasks import PRIME_SUMS, problems
from companion.training import preset, train

F64 = torch.float64
G = 4


def t(*values):
    return torch.tensor(values, dtype=F64)


def rows_of(*lengths, width=None):
    """A mask of right-padded rows."""
    return torch.arange(width or max(max(lengths), 1)) < torch.tensor(lengths)[:, None]


def on_policy(advantages, lengths, size, width=None):
    """Loss and gradient of log-probs 0 whose ratio is 1."""
    mask = rows_of(*lengths, width=width)
    logps = torch.zeros(mask.shape, dtype=F64, requires_grad=True)
    loss = dr_grpo_loss(logps, torch.zeros_like(logps), advantages, mask, 0.2, size)
    (gradient,) = torch.autograd.grad(loss, logps)
    return loss.item(), gradient


# Advantages: no std.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("value, size", [(1.0, 4), (0.1, 7), (1 / 3, 3), (-1e6, 5), (0.0, 2)])
def test_equal_rewards_teach_nothing(dtype, value, size):
    rewards = torch.full((size,), value, dtype=dtype)
    advantages = group_advantages(rewards, size, scale="none")
    assert (advantages == 0).all() and degenerate_groups(rewards, size).all()
    loss, gradient = on_policy(advantages.double(), range(1, size + 1), 16)
    assert loss == 0 and (gradient == 0).all()


@pytest.mark.parametrize(
    "rewards, expected",
    [
        ([1.0, 0.0, 0.0, 0.0], [0.75, -0.25, -0.25, -0.25]),
        ([1.0, 0.0], [0.5, -0.5]),
        ([100.0, 0.0], [50.0, -50.0]),  # a std would make ±.707 of both
        ([1.0, None, 0.0, 0.0], [2 / 3, 0.0, -1 / 3, -1 / 3]),
        ([None, 1.0, None, None], [0.0, 0.0, 0.0, 0.0]),
    ],
)
def test_advantages_by_hand(rewards, expected):
    advantages = group_advantages(rewards, len(rewards), scale="none")
    assert advantages.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.bad_input
def test_a_group_of_one_has_nothing_to_compare_with():
    with pytest.raises(ValueError, match="G ≥ 2"):
        group_advantages([1.0, 0.0], 1, scale="none")


def test_interleaved_prompts_are_grouped_by_prompt():
    rewards, prompts = [1.0, 0.0, 1.0, 0.0], ["A", "B", "A", "B"]
    blind = group_advantages(rewards, 2, "none")
    assert group_advantages(rewards, 2, "none", prompts).tolist() == [0, 0, 0, 0]
    assert blind.tolist() == [0.5, -0.5, 0.5, -0.5]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_leave_one_out_is_a_constant_times_the_advantage(size):
    g = torch.Generator().manual_seed(size)
    rewards = torch.randn(4 * size, generator=g, dtype=F64)
    rloo = [
        r - sum(other for j, other in enumerate(group) if j != i) / (size - 1)
        for group in rewards.view(-1, size).tolist() for i, r in enumerate(group)
    ]  # fmt: skip
    ours = size / (size - 1) * group_advantages(rewards, size, scale="none")
    assert ours.tolist() == pytest.approx(rloo, abs=1e-12)


# The expectation over all groups of a small world.


def expected_gradient(world, theta, rewards, size, loss, scale):
    """Of −loss, over every group of the one prompt's responses."""
    groups = torch.cartesian_prod(*[torch.arange(len(world.responses))] * size)
    theta = theta.clone().requires_grad_()
    table = world.token_log_probs(theta)[0]
    total = torch.zeros_like(theta)
    for rows in groups:
        logps = table[rows]
        advantages = group_advantages(rewards[rows], size, scale)
        value = -loss(logps, logps.detach(), advantages, world.mask[rows])
        chance = logps.sum().exp().item()
        total += chance * torch.autograd.grad(value, theta, retain_graph=True)[0]
    return total


def gradient_of_J(world, theta, rewards):
    theta = theta.clone().requires_grad_()
    J = expect(world.log_probs(theta).exp(), rewards).sum()
    return torch.autograd.grad(J, theta)[0]


def cosine(u, v):
    return torch.cosine_similarity(u.flatten(), v.flatten(), dim=0).item()


@pytest.fixture
def world():
    world, g = World(prompts=1, letters=1, max_length=3), torch.Generator().manual_seed(0)
    return world, world.random_logits(g), world.random_rewards(g)[0]


def equation(logps, old, advantages, mask):
    return dr_grpo_loss(logps, old, advantages, mask, 0.2, 1)


def per_token(logps, old, advantages, mask):
    return grpo_loss(logps, old, advantages, mask, 0.2)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_mean_gradient_is_a_constant_times_the_true_one(world, size):
    found = expected_gradient(*world, size, equation, "none")
    assert (found - (1 - 1 / size) * gradient_of_J(*world)).abs().max() < 1e-10


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_response_mean_turns_it_at_every_size_of_the_group(world, size):
    found = expected_gradient(*world, size, per_token, "none")
    two = expected_gradient(*world, 2, per_token, "none")
    assert cosine(found, gradient_of_J(*world)) < 0.9
    assert cosine(found, two) == pytest.approx(1, abs=1e-12)


def test_the_std_keeps_the_direction_of_one_binary_prompt_only(world):
    small, theta, _ = world
    binary, graded = t(0.0, 1.0, 0.0, 1.0), t(0.0, 1.0, 0.2, 0.2)
    for rewards, same in ((binary, True), (graded, False)):
        found = expected_gradient(small, theta, rewards, 3, equation, "group")
        direction = cosine(found, gradient_of_J(small, theta, rewards))
        assert (direction > 1 - 1e-12) == same


# What the loss is divided by.


@pytest.mark.parametrize("size, expected", [(1, 3.0), (10, 0.3), (512, 6 / 1024)])
def test_two_and_eight_tokens(size, expected):
    mask, zeros = rows_of(2, 8), torch.zeros(2, 8, dtype=F64)
    loss, _ = on_policy(t(1, -1), (2, 8), size)
    assert loss == pytest.approx(expected, abs=1e-12)
    assert grpo_loss(zeros, zeros, t(1, -1), mask, 0.2).item() == 0
    assert dapo_loss(zeros, zeros, t(1, -1), mask, 0.2, 0.28).item() == pytest.approx(0.6)


@pytest.mark.parametrize("width", [8, 9, 100])
def test_the_padded_width_is_no_divisor(width):
    loss, gradient = on_policy(t(1, -1), (2, 8), 10, width)
    assert loss == pytest.approx(0.3, abs=1e-12)
    assert gradient[0, 0].item() == pytest.approx(-0.05, abs=1e-15)
    assert (gradient[:, 8:] == 0).all()


def test_groups_apart_have_the_mean_of_their_losses():
    # with a divisor of the batch's own (width, tokens) they would not
    advantages, lengths = t(1, -1, 0.5, -0.5), (1, 2, 9, 7)
    whole, _ = on_policy(advantages, lengths, 10)
    parts = [on_policy(advantages[i : i + 2], lengths[i : i + 2], 10)[0] for i in (0, 2)]
    assert sum(parts) / 2 == pytest.approx(whole, abs=1e-12)
    assert parts[0] != pytest.approx(whole, abs=1e-3)


@pytest.mark.parametrize("lengths, expected", [((2, 0), -0.1), ((0, 2), 0.1), ((0, 0), 0.0)])
def test_an_empty_response_counts_in_the_divisor(lengths, expected):
    loss, gradient = on_policy(t(1, -1), lengths, 10)
    assert loss == pytest.approx(expected, abs=1e-12)
    assert torch.isfinite(gradient).all()


def test_a_token_weighs_the_same_in_a_long_response_and_in_a_short_one():
    _, gradient = on_policy(t(1, -1), (1, 20), 10)
    assert gradient[0, 0] == -gradient[1, 0] == -gradient[1, 19] == -1 / 20


# The ratio.


@pytest.mark.parametrize(
    "ratio, advantage, objective, slope",
    [(1.5, 1, 1.2, 0.0), (1.5, -1, -1.5, -1.5), (0.5, 1, 0.5, 0.5), (0.5, -1, -0.8, 0.0)],
)
def test_the_clip_stops_what_has_moved_far_enough(ratio, advantage, objective, slope):
    logps = t([math.log(ratio)]).requires_grad_()
    value = -dr_grpo_loss(logps, t([0.0]), t(advantage), torch.ones(1, 1), 0.2, 1)
    (gradient,) = torch.autograd.grad(value, logps)
    assert (value.item(), gradient.item()) == pytest.approx((objective, slope), abs=1e-12)


def test_an_overflowing_ratio_is_clipped_where_it_can_be():
    logps = torch.tensor([[89.0]], requires_grad=True)
    arguments = torch.zeros(1, 1), torch.ones(1), torch.ones(1, 1), 0.2, 1
    loss = dr_grpo_loss(logps, *arguments)
    (gradient,) = torch.autograd.grad(loss, logps)
    assert loss.item() == pytest.approx(-1.2) and gradient.item() == 0


@pytest.mark.bad_input
def test_what_cannot_be_computed_is_named():
    zeros, mask = torch.zeros(2, 3), torch.ones(2, 3)
    unlikely = zeros.index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(-math.inf))
    with pytest.raises(ValueError, match=r"logps\[1, 2\] is -inf"):
        dr_grpo_loss(unlikely, zeros, torch.ones(2), mask, 0.2, 10)
    with pytest.raises(ValueError, match=r"\[1, 2\] is 89.0: the ratio overflows"):
        far = zeros.index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(89.0))
        dr_grpo_loss(far, zeros, -torch.ones(2), mask, 0.2, 10)
    with pytest.raises(ValueError, match="max_completion_length must be .* above 0, got 0"):
        dr_grpo_loss(zeros, zeros, torch.ones(2), mask, 0.2, 0)


def test_one_number_for_all_tokens_is_no_ratio_of_the_sequence():
    # 100 tokens of log-ratio .01: every token's ratio is 1.01, their product e
    logps = torch.full((1, 100), 0.01, dtype=F64)
    zeros, one = torch.zeros_like(logps), torch.ones(1, 100)
    loss = dr_grpo_loss(logps, zeros, t(1), one, 0.2, 100)
    assert loss.item() == pytest.approx(-1.010050, abs=1e-6)


# TRL's trainer.


@pytest.fixture
def models():
    """A policy and the one that wrote the completions, in float64, that differ a little."""
    old, tokenizer = load("prime-sums", dtype=F64)
    model, g = copy.deepcopy(old), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.02 * torch.randn(p.shape, generator=g, dtype=F64)
    return model, old, tokenizer


REWARDS = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0]
TEXTS = ["77", "78", "97", "7", "129", "127", "129", "12"]


def trl(models, rewards=REWARDS, cut=(7,), rows=slice(None), **config):
    """TRL's answer; the completions in `cut` have no end token."""
    model, old, tokenizer = models
    prompts = ["20未満の素数の合計は？"] * G + ["30未満の素数の合計は？"] * G
    completions = [
        ids + [tokenizer.eos_token_id] * (i not in cut)
        for i, ids in enumerate(tokenizer(TEXTS)["input_ids"])
    ]
    page = dict(
        loss_type="dr_grpo", importance_sampling_level="token", scale_rewards="none", beta=0.0,
        epsilon=0.2, num_generations=G, max_completion_length=16, num_iterations=2,
    )  # fmt: skip
    return trl_grpo(
        model, old, old, tokenizer(prompts)["input_ids"][rows], completions[rows], rewards[rows],
        tokenizer, **(page | config),
    )  # fmt: skip


def ours(models, result, rewards=REWARDS, size=16):
    model, old, _ = models
    logps, old_logps = (token_log_probs(lm, **result.batch).detach() for lm in (model, old))
    advantages = group_advantages(t(*rewards), G, scale="none")
    return dr_grpo_loss(logps, old_logps, advantages, result.batch["completion_mask"], 0.2, size)


def norm(result):
    return math.sqrt(sum((g**2).sum().item() for g in result.gradients.values()))


@pytest.mark.parametrize("size", [16, 512])
def test_trl_divides_by_the_setting_besides(models, size):
    equation, scaled = trl(models, max_completion_length=1), trl(models, max_completion_length=size)
    assert size * scaled.loss.item() == pytest.approx(equation.loss.item(), abs=1e-12)
    assert size * norm(scaled) == pytest.approx(norm(equation), rel=1e-12)
    assert ours(models, scaled, size=size).item() == pytest.approx(scaled.loss.item(), abs=1e-15)


def test_trl_does_not_divide_by_the_width(models):
    whole = trl(models)
    halves = [trl(models, rows=rows) for rows in (slice(0, G), slice(G, None))]
    widths = [r.batch["completion_mask"].any(0).sum().item() for r in halves]
    assert widths == [3, 4]
    assert sum(r.loss for r in halves).item() / 2 == pytest.approx(whole.loss.item(), abs=1e-15)


def test_the_loss_type_alone_keeps_the_std(models):
    rewards = [1.0, 0, 0, 0, 1.0, 0, 0, 0]
    assert trl(models, rewards).advantages[:2].tolist() == pytest.approx([0.75, -0.25])
    half_way = trl(models, rewards, scale_rewards="group").advantages[:2]
    assert half_way.tolist() == pytest.approx([1.499700, -0.499900], abs=1e-6)


def test_the_printed_loss_says_only_which_responses_are_longer(models):
    result = trl(models, num_iterations=1)  # the ratio is 1
    lengths = result.batch["completion_mask"].sum(-1)
    expected = -(result.advantages * lengths).sum().item() / (8 * 16)
    assert result.loss.item() == pytest.approx(expected, abs=1e-9)
    assert norm(result) > 0.1
    same = trl(models, [1.0, 0, 0, 0, 0, 0, 0, 0], num_iterations=1, cut=(0, 1, 2))
    # three of the four responses have 2 tokens, and so has the fourth with its end token
    assert same.loss.item() == pytest.approx(0, abs=1e-9) and norm(same) > 0.1


def test_a_masked_cut_completion_stays_in_the_divisor_and_in_the_baseline(models):
    kept, masked = trl(models), trl(models, mask_truncated_completions=True)
    assert masked.batch["completion_mask"][7].sum() == 0
    assert torch.equal(masked.advantages, kept.advantages)
    assert ours(models, masked).item() == pytest.approx(masked.loss.item(), abs=1e-15)
    assert masked.loss.item() != pytest.approx(kept.loss.item(), abs=1e-5)


def test_everything_masked_is_0_not_nan(models):
    empty = trl(models, cut=range(8), mask_truncated_completions=True)
    assert empty.loss.item() == 0 and norm(empty) == 0


def test_a_kl_term_is_summed_over_the_tokens_too(models):
    plain, with_kl = trl(models), trl(models, beta=0.04, use_bias_correction_kl=False)
    logps, ref_logps = (token_log_probs(lm, **plain.batch).detach() for lm in models[:2])
    k3 = (kl_k3(logps, ref_logps) * plain.batch["completion_mask"]).sum().item()
    assert (with_kl.loss - plain.loss).item() == pytest.approx(0.04 * k3 / (8 * 16), abs=1e-15)
    assert k3 > 0.01


def test_unscored_rows_are_left_out(models):
    rewards = [1.0, None, 0.0, None, *REWARDS[G:]]
    result = trl(models, rewards)
    assert result.advantages[:G].tolist() == [0.5, 0.0, -0.5, 0.0]
    scored = [math.nan if r is None else r for r in rewards]
    assert ours(models, result, scored).item() == pytest.approx(result.loss.item(), abs=1e-15)


def run(tmp_path, **changes):
    config = dict(
        loss_type="dr_grpo", importance_sampling_level="token", scale_rewards="none", epsilon=0.2,
        max_completion_length=8,
    )  # fmt: skip
    row = preset("dr_grpo")
    return train(GRPOTrainer(
        model=str(checkpoint("prime-sums")),
        reward_funcs=exact_match,
        args=GRPOConfig(beta=row.beta, **config, **row.arguments(
            output_dir=str(tmp_path), use_cpu=True, bf16=False, max_steps=1, learning_rate=0.0,
            num_generations=G, **changes,
        )),
        processing_class=load("prime-sums")[1],
        train_dataset=problems(PRIME_SUMS, 100, seed=0),
    )).iloc[0]  # fmt: skip


def test_accumulation_is_exact_though_it_is_a_mean_of_means(tmp_path):
    whole = run(tmp_path, per_device_train_batch_size=16)
    parts = run(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=4)
    assert whole["grad_norm"] > 1e-3
    for name in ("loss", "grad_norm", "reward"):
        assert parts[name] == pytest.approx(whole[name], abs=1e-6)


def test_the_defaults_are_not_dr_grpos(tmp_path):
    defaults = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False)
    assert (defaults.loss_type, defaults.scale_rewards) == ("dapo", "group")
    assert defaults.max_completion_length > 1 and not defaults.mask_truncated_completions
