"""Inputs that broke other implementations of RLHF by PPO, with their right values."""

import copy

import pytest
import torch
from datasets import Dataset

from companion.exact import World, expect, kl, tilt
from companion.lm import build_tokenizer, completion_batch, load, token_log_probs
from companion.losses import gae, kl_penalized_rewards, ppo_policy_loss, ppo_value_loss, whiten
from companion.oracle import HAS_PPO, trl_ppo
from companion.training import new_reward_model

needs_ppo = pytest.mark.skipif(not HAS_PPO, reason="this TRL has no PPOTrainer")

LIMITS = (12, 20, 30, 45, 64, 77, 98, 99)
BETA, LAM = 0.05, 0.95


def t(*rows):
    return torch.tensor(rows, dtype=torch.float64)


@pytest.fixture(scope="module")
def models():
    """Policy, reference, reward model and value model in float64, all of them different."""
    policy, _ = load("prime-sums", dtype=torch.float64)
    ref_policy = copy.deepcopy(policy)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in ref_policy.parameters():
            p += 0.2 * p.std() * torch.randn(p.shape, generator=g, dtype=p.dtype)
    heads = (new_reward_model("prime-sums", seed=seed).double() for seed in (2, 3))
    return policy, ref_policy, *heads


@pytest.fixture(scope="module")
def prompts():
    """All as long as each other, so that no padding moves a position."""
    return build_tokenizer()([f"{n}未満の素数の合計は？" for n in LIMITS])["input_ids"]


@pytest.fixture(scope="module")
def ask(models, prompts):
    def run(prompts=prompts, tokenizer=None, models=models, **config):
        settings = dict(
            num_ppo_epochs=1, response_length=4, temperature=1.0, kl_coef=BETA, learning_rate=0.0
        )
        return trl_ppo(*models, prompts, tokenizer or build_tokenizer(), **(settings | config))

    return run


@pytest.fixture(scope="module")
def run(ask):
    """Responses of unequal length, some of which end and some of which are cut."""
    result = ask()
    ended = result.mask.sum(-1) < result.mask.shape[1]
    assert ended.any() and not ended.all()
    return result


# The rewards: the score once, on the last token, of cut responses too.


def test_the_score_stands_on_the_last_token_once():
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]])  # the second one is cut
    same = torch.full((3, 4), -2.0).double()
    rewards = kl_penalized_rewards(t(5.0, 6.0, 7.0).squeeze(), same, same, mask, 0.1)
    assert torch.equal(rewards, t([0, 0, 5, 0], [0, 0, 0, 6], [7, 0, 0, 0]))


def test_the_penalty_is_charged_on_every_token_with_k1s_sign():
    logps, ref = t([-1.0, -3.0, -9.0]), t([-2.0, -1.0, -9.0])
    rewards = kl_penalized_rewards(torch.zeros(1).double(), logps, ref, torch.ones(1, 3), 0.5)
    assert torch.allclose(rewards, t([-0.5, 1.0, 0.0]))  # rarer than the reference is paid back


@pytest.mark.bad_input
def test_a_response_without_a_token_has_no_place_for_its_score():
    table = torch.zeros(2, 3)
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    with pytest.raises(ValueError, match=r"mask\[1\] has no real token to carry the score"):
        kl_penalized_rewards(torch.zeros(2), table, table, mask, 0.1)


@pytest.mark.bad_input
def test_a_negative_coefficient_is_refused():
    table = torch.zeros(1, 2)
    with pytest.raises(ValueError, match="beta must be"):
        kl_penalized_rewards(torch.zeros(1), table, table, torch.ones(1, 2), -0.1)


# GAE: by hand, over padding, and with the score one slot late.


def test_gae_by_hand_and_a_value_under_the_padding_changes_nothing():
    rewards, values = t([0, 0, 1, 0]), t([0.5, 0.6, 0.7, 2.0])
    advantages, returns = gae(rewards, values, torch.tensor([[1, 1, 1, 0]]))
    assert torch.allclose(advantages, t([0.46575, 0.385, 0.3, 0.0]))
    assert torch.allclose(returns, t([0.96575, 0.985, 1.0, 0.0]))
    unmasked, _ = gae(rewards, values, torch.ones(1, 4))
    assert abs(unmasked[0, 2] - 0.3) > 0.05  # the 2 under the padding leaks


def test_the_terminal_score_on_the_eos_or_on_the_slot_after_it():
    on_eos, _ = gae(t([1.0]), t([0.7]), torch.ones(1, 1))
    after, _ = gae(t([0.0, 1.0]), t([0.7, 0.7]), torch.ones(1, 2))
    assert on_eos.item() == pytest.approx(0.3) and after[0, 0].item() == pytest.approx(0.285)


@needs_ppo
def test_trl_puts_the_score_after_the_eos_and_on_the_last_token_of_a_cut_response(run):
    scored = run.raw_rewards - run.kl_rewards
    length, width = run.mask.sum(-1), run.mask.shape[1]
    place = torch.minimum(length, torch.tensor(width - 1))
    expected = torch.zeros_like(scored).scatter(1, place[:, None], run.scores[:, None])
    assert torch.allclose(scored, expected)

    ours = kl_penalized_rewards(run.scores, run.logps.double(), run.ref_logps, run.mask, BETA)
    advantages, _ = gae(ours, run.values, run.mask)
    theirs = run.returns - run.values
    for i in (length < width).nonzero().flatten().tolist():
        gap = (theirs - advantages)[i, length[i] - 1].item()
        value_after = run.values[i, length[i]].item()
        assert gap == pytest.approx((1 - LAM) * (value_after - run.scores[i].item()), abs=1e-12)


# The KL: in one place, zero at the start, of the sampling temperature.


def test_kl_in_the_reward_and_in_the_loss_is_counted_twice():
    world, beta = World(prompts=2, letters=2, max_length=2), 0.4
    g = torch.Generator().manual_seed(0)
    ref_logits, scores = world.random_logits(g), world.random_rewards(g)
    ref_logps, ref_tokens = world.log_probs(ref_logits), world.token_log_probs(ref_logits)

    def gradient_at(logps, in_loss):
        theta = world.logits_of(logps).requires_grad_()
        tokens = world.token_log_probs(theta)
        rows = [x.expand(tokens.shape).flatten(0, 1) for x in (tokens, ref_tokens, world.mask)]
        rewards = kl_penalized_rewards(scores.flatten(), *rows, beta).view(tokens.shape).sum(-1)
        logps = tokens.sum(-1)
        objective = expect(logps.exp(), rewards) - in_loss * beta * kl(logps, ref_logps)
        return torch.autograd.grad(objective.sum(), theta)[0].abs().max().item()

    star, double = (tilt(ref_logps, scores / (times * beta)) for times in (1, 2))
    assert gradient_at(star, in_loss=0) < 1e-12 and gradient_at(double, in_loss=1) < 1e-12
    assert gradient_at(double, in_loss=0) > 1e-3 and gradient_at(star, in_loss=1) > 1e-3


@needs_ppo
def test_trl_has_one_coefficient_for_the_kl():
    from trl.experimental.ppo import PPOConfig

    names = PPOConfig.__dataclass_fields__
    assert {"kl_coef", "kl_estimator"} <= set(names) and "beta" not in names


@needs_ppo
def test_the_kl_is_zero_while_policy_and_reference_are_the_same(ask, models):
    policy, _, *heads = models
    same = ask(models=(policy, copy.deepcopy(policy), *heads))
    assert abs(same.metrics["objective/kl"]) < 1e-5
    assert same.kl_rewards[same.mask].abs().max() < 1e-6  # sampled in float32


@needs_ppo
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_temperature_is_in_both_log_probs_of_the_kl(ask, models, prompts, temperature):
    run = ask([prompts[0]] * 8, temperature=temperature, response_length=1)
    tokens = torch.arange(len(build_tokenizer()))
    ids = torch.cat([torch.tensor([prompts[0]] * len(tokens)), tokens[:, None]], -1)
    first = torch.zeros_like(ids)
    first[:, -1] = 1
    with torch.no_grad():  # log-probs of every token that may come first
        policy, reference = (
            token_log_probs(lm, ids, torch.ones_like(ids), first, temperature)[:, -1]
            for lm in models[:2]
        )
    sampled = (policy - run.logps).abs().argmin(-1)
    assert (policy[sampled] - run.logps[:, 0]).abs().max() < 1e-5
    assert (reference[sampled] - run.ref_logps[:, 0]).abs().max() < 1e-5


@needs_ppo
def test_the_kl_changes_with_the_temperature_left_at_its_default(ask):
    from trl.experimental.ppo import PPOConfig

    assert PPOConfig.__dataclass_fields__["temperature"].default == 0.7
    warm, cool = (ask(temperature=x).metrics["objective/entropy"] for x in (1.0, 0.7))
    assert cool < 0.8 * warm


# Padding and end of text.


def test_a_mask_by_position_keeps_the_eos_where_pad_and_eos_are_one():
    tokenizer = build_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    rows = completion_batch(tokenizer, ["20>", "3>"], ["77", "5678"])
    assert rows["completion_mask"].sum(-1).tolist() == [3, 5]
    ends = rows["completion_mask"].bool() & (rows["input_ids"] == tokenizer.eos_token_id)
    assert ends.sum(-1).tolist() == [1, 1]


@needs_ppo
def test_trl_tells_the_end_by_value_and_loses_the_eos(run, ask):
    tokenizer = build_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    lost = ask(tokenizer=tokenizer)
    shorter = run.mask.sum(-1) - lost.mask.sum(-1)
    ended = run.mask.sum(-1) < run.mask.shape[1]
    assert torch.equal(shorter[ended], torch.ones_like(shorter[ended]))
    assert (lost.scores - run.scores)[ended].abs().min() > 1e-3  # read one token early, too


# Whitening, accumulation, the value's loss.


@needs_ppo
def test_trls_advantages_are_whitened_over_the_policys_tokens(run):
    raw = torch.where(run.mask, run.returns - run.values, 0.0)
    assert torch.allclose(whiten(raw, run.mask), run.advantages, atol=1e-12)
    assert run.advantages[run.mask].std().item() == pytest.approx(1.0, abs=1e-6)
    # the scale of score, β and value goes; a common shift of all rewards does not
    assert torch.allclose(whiten(10 * raw, run.mask), run.advantages, atol=1e-6)


@needs_ppo
def test_accumulation_takes_the_mean_of_the_micro_batches_means(ask):
    parts = ask(per_device_train_batch_size=2, gradient_accumulation_steps=4).updates
    sizes = torch.stack([part.mask.sum() for part in parts])
    assert len(parts) == 4 and sizes.unique().numel() > 1

    def joined(name):
        return torch.cat([getattr(part, name) for part in parts])

    over_all = ppo_policy_loss(
        joined("logps"), joined("old_logps").double(), joined("advantages"), joined("mask"), 0.2
    )
    assert abs(over_all) < 1e-6  # at ratio 1 the loss is minus the mean of whitened advantages
    losses = torch.stack([part.policy_loss for part in parts])
    assert abs(losses.mean()) > 1e-3
    assert (sizes * losses).sum() / sizes.sum() == pytest.approx(over_all.item(), abs=1e-12)


@needs_ppo
def test_trls_value_loss_counts_the_slot_of_the_score(run):
    (update,) = run.updates
    ended = run.mask.sum(-1) < run.mask.shape[1]
    assert torch.equal(run.value_mask.sum(-1) - run.mask.sum(-1), ended.long())
    losses = [
        ppo_value_loss(update.values, update.old_values, update.returns, mask, 0.2).item()
        for mask in (update.value_mask, update.mask)
    ]
    assert losses[0] == pytest.approx(update.value_loss.item(), abs=1e-12)
    assert abs(losses[1] - losses[0]) > 1e-3


# What TRL's trainer is given.


@pytest.fixture
def build(tmp_path, prompts):
    def trainer(rows=None, **models):
        from trl.experimental.ppo import PPOConfig, PPOTrainer

        given = dict(
            model=load("prime-sums")[0],
            ref_model=load("prime-sums")[0],
            reward_model=new_reward_model("prime-sums"),
            value_model=new_reward_model("prime-sums"),
        )
        arguments = PPOConfig(
            str(tmp_path), use_cpu=True, bf16=False, gradient_checkpointing=False,
            num_sample_generations=0, report_to="none", disable_tqdm=True, response_length=2,
        )  # fmt: skip
        return PPOTrainer(
            args=arguments, processing_class=build_tokenizer(), eval_dataset=None,
            train_dataset=Dataset.from_list(rows or [{"input_ids": ids} for ids in prompts]),
            **(given | models),
        )  # fmt: skip

    return trainer


@needs_ppo
def test_fewer_prompts_than_a_batch_leave_no_batch(build, prompts):
    # train() would then wait for a first batch for ever
    assert len(build().dataloader) == 1
    assert len(build([{"input_ids": ids} for ids in prompts[:7]]).dataloader) == 0


@needs_ppo
def test_a_column_of_text_is_refused_when_the_first_batch_is_made(build):
    trainer = build([{"prompt": "20未満の素数の合計は？"}] * 8)
    with pytest.raises(ValueError, match="encoding"):
        trainer.train()


@needs_ppo
def test_the_reference_must_be_another_object(build):
    policy, _ = load("prime-sums")
    with pytest.raises(ValueError, match="cannot be the same object"):
        build(model=policy, ref_model=policy)
    copied = build(model=policy, ref_model=None).ref_model
    assert copied is not policy
    for ours, theirs in zip(policy.parameters(), copied.parameters(), strict=True):
        assert torch.equal(ours, theirs) and not theirs.requires_grad


def test_a_reward_model_gives_one_number_a_row(prompts):
    ids = torch.tensor(prompts)
    logits = new_reward_model("prime-sums")(ids, torch.ones_like(ids)).logits
    assert logits.shape == (8, 1)
