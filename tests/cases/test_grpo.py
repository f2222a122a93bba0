"""Inputs that broke other implementations of GRPO, with their right values."""

import copy
import math

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from companion.exact import World, tilt
from companion.lm import checkpoint, load, token_log_probs
from companion.losses import dapo_loss, degenerate_groups, group_advantages, grpo_loss, kl_k3
from companion.oracle import trl_grpo
from companion.rewards import exact_match
from companion.training import preset, train

F64 = torch.float64
QUESTION = "20未満の素数の合計は？"


def t(*values):
    return torch.tensor(values, dtype=F64)


def rows_of(*lengths):
    """A mask of right-padded rows."""
    return torch.arange(max(max(lengths), 1)) < torch.tensor(lengths)[:, None]


def on_policy(advantages, lengths, beta=0.0):
    """Loss and gradient of log-probs 0 whose ratio is 1."""
    mask = rows_of(*lengths)
    logps = torch.zeros(mask.shape, dtype=F64, requires_grad=True)
    loss = grpo_loss(logps, torch.zeros_like(logps), advantages, mask, 0.2)
    (gradient,) = torch.autograd.grad(loss, logps)
    return loss.item(), gradient


# Advantages.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("value, size", [(1.0, 4), (0.1, 7), (1 / 3, 3), (-1e6, 5), (0.0, 2)])
def test_equal_rewards_teach_nothing(dtype, value, size):
    # the mean of seven .1 is not .1 in float32: the plain formula leaves 7e-5
    rewards = torch.full((size,), value, dtype=dtype)
    advantages = group_advantages(rewards, size)
    assert (advantages == 0).all() and degenerate_groups(rewards, size).all()
    loss, gradient = on_policy(advantages.double(), [3] * size)
    assert loss == 0 and (gradient == 0).all()


@pytest.mark.parametrize(
    "rewards, scale, expected",
    [
        ([1.0, 0.0, 0.0, 0.0], "group", [1.499700, -0.499900, -0.499900, -0.499900]),
        ([1.0, 0.0, 0.0, 0.0], "none", [0.75, -0.25, -0.25, -0.25]),
        ([1.0, 0.0], "group", [0.707007, -0.707007]),
        ([1.0, None, 0.0, 0.0], "group", [1.154500, 0.0, -0.577250, -0.577250]),
        ([None, 1.0, None, None], "group", [0.0, 0.0, 0.0, 0.0]),
    ],
)
def test_advantages_by_hand(rewards, scale, expected):
    advantages = group_advantages(rewards, len(rewards), scale)
    assert advantages.tolist() == pytest.approx(expected, abs=1e-6)


def test_no_scored_row_at_all_is_warned_of():
    with pytest.warns(UserWarning, match="no row of rewards is scored"):
        assert group_advantages([None] * 4, 2).tolist() == [0, 0, 0, 0]


@pytest.mark.bad_input
@pytest.mark.parametrize("size", [1, 0, -2])
def test_a_group_of_one_has_nothing_to_compare_with(size):
    with pytest.raises(ValueError, match="G ≥ 2"):
        group_advantages([1.0, 0.0], size)


def test_interleaved_prompts_are_grouped_by_prompt():
    rewards, prompts = [1.0, 0.0, 1.0, 0.0], ["A", "B", "A", "B"]
    assert group_advantages(rewards, 2, prompts=prompts).tolist() == [0, 0, 0, 0]
    blind = group_advantages(rewards, 2)
    assert blind.tolist() == pytest.approx([0.707007, -0.707007] * 2, abs=1e-6)


@pytest.mark.parametrize("size, share", [(2, 0.702), (4, 0.449), (8, 0.201), (16, 0.040)])
def test_share_of_degenerate_groups(size, share):
    p, n = 0.1819, 40_000
    coins = torch.rand(n * size, generator=torch.Generator().manual_seed(size))
    measured = degenerate_groups((coins < p).float(), size).float().mean().item()
    assert measured == pytest.approx(share, abs=5 * math.sqrt(share * (1 - share) / n) + 5e-4)


# The loss.


@pytest.mark.parametrize(
    "lengths, expected", [([2, 0], -0.5), ([0, 0], 0.0), ([2, 8], 0.0), ([1, 1], 0.0)]
)
def test_an_empty_response_counts_as_0_in_the_mean(lengths, expected):
    loss, gradient = on_policy(t(1.0, -1.0), lengths)
    assert loss == expected
    assert torch.isfinite(gradient).all() and (gradient[~rows_of(*lengths)] == 0).all()


@pytest.mark.parametrize(
    "ratio, advantage, objective, slope",
    [(1.5, 1.0, 1.2, 0.0), (1.5, -1.0, -1.5, -1.5), (0.5, 1.0, 0.5, 0.5), (0.5, -1.0, -0.8, 0.0)],
)
def test_the_clip_stops_what_has_moved_far_enough(ratio, advantage, objective, slope):
    logps = t([math.log(ratio)]).requires_grad_()
    loss = grpo_loss(logps, t([0.0]), t(advantage), rows_of(1), 0.2)
    (gradient,) = torch.autograd.grad(-loss, logps)
    assert -loss.item() == pytest.approx(objective, abs=1e-12)
    assert gradient.item() == pytest.approx(slope, abs=1e-12)


def test_an_overflowing_ratio_is_clipped_where_it_can_be():
    huge = torch.tensor([[89.0]], requires_grad=True)  # e^89 is infinite in float32
    zero, one = torch.zeros(1, 1), torch.ones(1, 1)
    loss = grpo_loss(huge, zero, torch.ones(1), one, 0.2)
    (gradient,) = torch.autograd.grad(loss, huge)
    assert loss.item() == pytest.approx(-1.2) and gradient.item() == 0
    with pytest.raises(ValueError, match=r"\[0, 0\] is 89"):
        grpo_loss(huge, zero, -torch.ones(1), one, 0.2)


@pytest.mark.parametrize("bad", [-math.inf, math.nan])
def test_a_log_prob_of_minus_infinity_is_named(bad):
    logps, zero = t([-1.0, 0.0], [-2.0, bad]), torch.zeros(2, 2, dtype=F64)
    with pytest.raises(ValueError, match=r"^logps\[1, 1\] is (-inf|nan)"):
        grpo_loss(logps, zero, t(1.0, -1.0), rows_of(2, 2), 0.2)
    with pytest.raises(ValueError, match=r"^old_logps\[1, 1\] is"):
        grpo_loss(zero, logps, t(1.0, -1.0), rows_of(2, 2), 0.2)
    # under the mask it does not matter
    assert grpo_loss(zero, logps, t(1.0, -1.0), rows_of(2, 1), 0.2).isfinite()


def test_the_printed_loss_is_0_while_the_gradient_is_not():
    lengths, advantages = [4, 1, 2, 3], group_advantages(t(1.0, 0.0, 0.0, 0.0), 4)
    mask = rows_of(*lengths)
    loss, gradient = on_policy(advantages, lengths)
    by_hand = torch.where(mask, -(advantages / (4 * t(*lengths)))[:, None], 0.0)
    assert loss == pytest.approx(0.0, abs=1e-12)
    assert torch.allclose(gradient, by_hand, rtol=0, atol=1e-12)
    zeros = torch.zeros(mask.shape, dtype=F64)
    assert dapo_loss(zeros, zeros, advantages, mask, 0.2, 0.28).item() == pytest.approx(
        -0.3, abs=1e-4
    )
    # with β the value is β·KL, and says nothing of the rewards either
    ref = zeros + math.log(2)
    with_kl = grpo_loss(zeros, zeros, advantages, mask, 0.2, ref, 0.04).item()
    assert with_kl == pytest.approx(0.04 * 0.306853, abs=1e-7)


# The KL term.


@pytest.mark.parametrize("d, value", [(math.log(2), 0.306853), (-math.log(2), 0.193147), (0, 0)])
def test_k3_is_not_reversed(d, value):
    assert kl_k3(t(-1.0), t(-1.0 + d)).item() == pytest.approx(value, abs=1e-6)


def test_k3_as_a_loss_has_the_gradient_of_the_other_kl():
    theta = t(0.0).requires_grad_()  # the logit of action 2
    logps = torch.cat([torch.zeros_like(theta), theta]).log_softmax(0)
    ref = t(0.2, 0.8).log()
    draws = logps.detach().exp()
    mean = (draws * kl_k3(logps, ref)).sum()
    (slope,) = torch.autograd.grad(mean, theta, retain_graph=True)
    assert mean.item() == pytest.approx(0.223144, abs=1e-6)  # E[k1] too
    assert slope.item() == pytest.approx(-0.3, abs=1e-12)  # ∇KL(π‖ref) would be −.346574
    (of_k1,) = torch.autograd.grad((draws * (logps - ref)).sum(), theta, retain_graph=True)
    (of_k2,) = torch.autograd.grad((draws * (logps - ref) ** 2 / 2).sum(), theta)
    assert of_k1.item() == pytest.approx(0.0, abs=1e-12)
    assert of_k2.item() == pytest.approx(-0.346574, abs=1e-6)


def test_kl_in_the_reward_and_in_the_loss_is_counted_twice():
    # one-letter answers, all pairs (G = 2): the gradient vanishes at π* of 2β, not of β
    world, beta = World(prompts=1, letters=2, max_length=1), 0.4
    g = torch.Generator().manual_seed(0)
    ref, rewards = world.log_probs(world.random_logits(g))[0], world.random_rewards(g)[0]

    def gradient(policy):
        theta = policy.clone().requires_grad_()
        logps = theta.log_softmax(0)
        pairs = torch.cartesian_prod(torch.arange(3), torch.arange(3))
        chances = policy.exp()[pairs].prod(-1)
        total = 0.0
        for pair, chance in zip(pairs, chances, strict=True):
            penalised = rewards[pair] - beta * (policy - ref)[pair]
            advantages = group_advantages(penalised, 2, "none")
            x = logps[pair][:, None]
            ratio = (x - x.detach()).exp()
            kl = (ratio * kl_k3(x, ref[pair][:, None])).mean()
            mask = torch.ones(2, 1)
            total = total + chance * (grpo_loss(x, x, advantages, mask, 0.2) + beta / 2 * kl)
        return torch.autograd.grad(total, theta)[0].abs().max().item()

    points = {times: tilt(ref[None], rewards / (times * beta))[0] for times in (1, 2)}
    assert gradient(points[2]) < 1e-12 and gradient(points[1]) > 1e-2


# TRL's trainer.

ANSWERS, ONE_RIGHT = ["77", "78", "1290", "7"], [1.0, 0.0, 0.0, 0.0]


@pytest.fixture
def models():
    """A policy, a policy some updates ago and a reference, in float64."""
    ref, _ = load("prime-sums", dtype=F64)
    moved = [copy.deepcopy(ref) for _ in range(2)]
    for seed, lm in enumerate(moved):
        g = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in lm.parameters():
                p += 0.02 * torch.randn(p.shape, generator=g, dtype=p.dtype)
    return *moved, ref


def ask_trl(models, rewards, answers=ANSWERS, prompt=QUESTION, **config):
    _, tokenizer = load("prime-sums")
    ids = [tokenizer([prompt] * len(answers))["input_ids"]]
    ids += [tokenizer([y + tokenizer.eos_token for y in answers])["input_ids"]]
    page = dict(loss_type="grpo", epsilon=0.2, num_generations=4, use_bias_correction_kl=False)
    return trl_grpo(*models, *ids, rewards, tokenizer, **(page | config))


def test_trl_leaves_unscored_rows_out_too(models):
    rewards = [1.0, None, 0.0, 0.0]
    theirs = ask_trl(models, rewards)
    assert theirs.advantages.tolist() == pytest.approx([1.1545, 0, -0.57725, -0.57725], abs=1e-5)
    assert theirs.metrics["reward"] == pytest.approx(1 / 3, abs=1e-6)  # of those that are scored


def test_with_one_update_a_generation_the_ratio_is_1_whatever_the_old_policy(models):
    one, two = (ask_trl(models, ONE_RIGHT, num_iterations=n) for n in (1, 2))
    assert one.metrics["clip_ratio/region_mean"] == 0 < two.metrics["clip_ratio/region_mean"]
    assert abs(one.loss) < 1e-7 < 1e-3 < abs(two.loss)
    assert max(g.abs().max() for g in one.gradients.values()) > 1e-2
    other = ask_trl(models, ONE_RIGHT, epsilon=1e-6)
    for name, gradient in one.gradients.items():
        assert torch.equal(gradient, other.gradients[name])  # ε is inert


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_temperature_is_in_all_three_policies(models, temperature):
    # before the first update: policy = old = reference
    same = ask_trl(
        (models[2],) * 3, ONE_RIGHT, temperature=temperature, beta=0.04, num_iterations=2
    )
    assert same.metrics["clip_ratio/region_mean"] == 0
    assert abs(same.metrics["kl"]) < 1e-12 and abs(same.loss) < 1e-7
    moved = ask_trl(models, ONE_RIGHT, temperature=temperature, beta=0.04, num_iterations=2)
    with torch.no_grad():
        tables = [token_log_probs(lm, **moved.batch, temperature=temperature) for lm in models]
        ours = grpo_loss(
            *tables[:2], moved.advantages, moved.batch["completion_mask"], 0.2, tables[2], 0.04
        )
    assert ours.item() == pytest.approx(moved.loss.item(), abs=1e-12)


def test_the_logged_kl_is_a_mean_over_tokens_the_loss_one_over_responses(models):
    theirs = ask_trl(models, ONE_RIGHT, beta=0.5)
    with torch.no_grad():
        logps, ref = (token_log_probs(models[i], **theirs.batch) for i in (0, 2))
    k3, sizes = kl_k3(logps, ref), theirs.batch["completion_mask"].sum(-1)
    assert theirs.metrics["kl"] == pytest.approx((k3.sum() / sizes.sum()).item(), abs=1e-9)
    assert theirs.loss.item() == pytest.approx(0.5 * (k3.sum(-1) / sizes).mean().item(), abs=1e-7)
    assert abs(theirs.loss.item() / 0.5 - theirs.metrics["kl"]) > 1e-3


def test_the_default_kl_has_the_same_value_and_another_gradient(models):
    plain = ask_trl(models, ONE_RIGHT, beta=0.5)
    default = ask_trl(models, ONE_RIGHT, beta=0.5, use_bias_correction_kl=True)
    assert default.loss.item() == pytest.approx(plain.loss.item(), abs=1e-12)
    gaps = [(default.gradients[n] - g).abs().max() for n, g in plain.gradients.items()]
    assert max(gaps) > 1e-3
    assert GRPOConfig("x", use_cpu=True, bf16=False).use_bias_correction_kl is True


def reward_func(completions, ground_truth, **kwargs):
    """The support page's."""
    return [
        float(completion.strip() == answer)
        for completion, answer in zip(completions, ground_truth, strict=True)
    ]


def trainer(tmp_path, rows=({"prompt": QUESTION, "ground_truth": "77"},), reward=reward_func,
            tokenizer=None, **config):  # fmt: skip
    page = dict(
        output_dir=str(tmp_path), num_generations=4, per_device_train_batch_size=4,
        loss_type="grpo", beta=0.04, epsilon=0.2, use_bias_correction_kl=False, use_cpu=True,
        bf16=False, gradient_checkpointing=False, report_to="none", save_strategy="no",
        disable_tqdm=True, logging_steps=1, max_steps=2, max_completion_length=8,
        learning_rate=1e-3,
    )  # fmt: skip
    return GRPOTrainer(
        model=str(checkpoint("prime-sums")),
        reward_funcs=reward,
        args=GRPOConfig(**(page | config)),
        processing_class=load("prime-sums")[1],
        train_dataset=Dataset.from_list(list(rows)),
    )


def test_a_missing_column_is_no_silent_zero(tmp_path):
    rows = [{"prompt": QUESTION, "answer": "77"}]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'ground_truth'"):
        trainer(tmp_path, rows).train()
    with pytest.raises(KeyError, match=r"no column 'ground_truth'; the columns are \['answer'\]"):
        trainer(tmp_path, rows, exact_match).train()


def test_the_pages_exact_match_and_its_limit():
    completions, truths = ["77", " 77\n", "77です。", "７７", "177"], ["77"] * 5
    assert reward_func(completions, truths) == [1, 1, 0, 0, 0]
    assert exact_match(completions=completions, ground_truth=truths) == [1, 1, 0, 0, 0]


def test_kl_is_0_at_the_start_and_no_longer_after_an_update(tmp_path):
    history = train(trainer(tmp_path, seed=3, max_steps=6))
    assert history["kl"].iloc[0] == 0
    assert history["kl"].iloc[-1] > 0


def test_the_same_seed_gives_the_same_rewards(tmp_path):
    def first(seed):
        history = train(trainer(
            tmp_path, seed=seed, per_device_train_batch_size=32, num_generations=32, max_steps=1))
        return history["reward"].iloc[0], history["completions/mean_length"].iloc[0]

    assert first(0) == first(0) != first(1)


def test_truncation_is_logged(tmp_path):
    history = train(trainer(tmp_path, max_completion_length=1, max_steps=1))
    assert history["completions/clipped_ratio"].iloc[0] == 1.0
    history = train(trainer(tmp_path, max_steps=1))
    assert history["completions/clipped_ratio"].iloc[0] == 0.0


def test_a_group_that_is_all_wrong_teaches_nothing(tmp_path):
    rows = [{"prompt": QUESTION, "ground_truth": "0"}]
    history = train(trainer(tmp_path, rows, beta=0.0))
    assert (history["frac_reward_zero_std"] == 1).all() and (history["grad_norm"] == 0).all()


def test_a_group_size_that_does_not_divide_lists_those_that_do(tmp_path):
    with pytest.raises(ValueError, match="must be divisible by num_generations"):
        trainer(tmp_path, num_generations=3)
    with pytest.raises(ValueError, match=r"use one of \[2, 4, 8, 16, 32, 64, 128\]"):
        preset("grpo").arguments(num_generations=3)
    assert preset("grpo").arguments(num_generations=16)["num_generations"] == 16
