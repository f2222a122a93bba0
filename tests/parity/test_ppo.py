"""PPO's rewards, advantages and losses against TRL's PPOTrainer, run for two epochs."""

import copy

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from companion.lm import load
from companion.losses import gae, kl_penalized_rewards, ppo_policy_loss, ppo_value_loss, whiten
from companion.oracle import HAS_PPO, trl_ppo

pytestmark = pytest.mark.skipif(not HAS_PPO, reason="this TRL has no PPOTrainer")

SETTINGS = {
    "k1": dict(kl_estimator="k1"),
    "k3": dict(kl_estimator="k3"),
    "whitened rewards": dict(whiten_rewards=True),
    "penalty for a missing EOS": dict(missing_eos_penalty=1.0),
    "gamma and lambda": dict(gamma=0.9, lam=0.8),
}
CLIP, BETA = 0.05, 0.05  # a narrow clip, so that it acts in the second epoch


@pytest.fixture
def ask(tokenizer, dtype):
    """TRL's run on eight prompts of unequal length; one response length cuts some of them."""
    model, _ = load("prime-sums", dtype=dtype)

    def moved(lm, seed):
        g = torch.Generator().manual_seed(seed)
        lm = copy.deepcopy(lm)
        with torch.no_grad():
            for p in lm.parameters():
                p += 0.2 * p.std() * torch.randn(p.shape, generator=g, dtype=torch.float64).to(p)
        return lm

    def classifier(seed):
        config = model.config.to_dict() | dict(
            num_labels=1, id2label={0: "r"}, label2id={"r": 0}, pad_token_id=tokenizer.pad_token_id
        )
        torch.manual_seed(seed)
        head = Qwen2ForSequenceClassification(Qwen2Config(**config)).to(dtype)
        head.model.load_state_dict(moved(model, seed).model.state_dict())
        return head

    limits = (20, 30, 5, 100, 7, 64, 99, 12)
    prompts = tokenizer([f"{n}未満の素数の合計は？" for n in limits])["input_ids"]

    def run(**config):
        return trl_ppo(
            model, moved(model, 1), classifier(2), classifier(3), prompts, tokenizer,
            num_ppo_epochs=2, response_length=4, temperature=1.0, learning_rate=1e-3,
            kl_coef=BETA, cliprange=CLIP, cliprange_value=CLIP, **config,
        )  # fmt: skip

    return run


@pytest.fixture
def assert_close(dtype):
    exact = dtype == torch.float64
    tolerance = dict(rtol=0, atol=1e-12) if exact else dict(rtol=1e-6, atol=1e-6)

    def compare(ours, theirs):
        torch.testing.assert_close(ours, theirs, check_dtype=False, **tolerance)
        return (ours - theirs).abs().max().item()

    return compare


@pytest.mark.parametrize("setting", SETTINGS)
def test_advantages_and_losses_equal_trl(setting, ask, dtype, assert_close, record_property):
    config = SETTINGS[setting]
    run = ask(**config)
    assert len(run.updates) == 2 and run.mask.sum(-1).unique().numel() > 1

    gamma, lam = config.get("gamma", 1.0), config.get("lam", 0.95)
    advantages, returns = gae(run.rewards, run.values, run.value_mask, gamma, lam)
    record_property("PPO gae", assert_close(advantages, run.returns - run.values))
    record_property("PPO gae", assert_close(returns, run.returns))
    whitened = torch.where(run.mask, advantages, 0.0)
    record_property("PPO whiten", assert_close(whiten(whitened, run.mask), run.advantages))
    if "whiten_rewards" in config:
        ours = whiten(run.raw_rewards, run.value_mask, shift_mean=False)
        record_property("PPO whiten", assert_close(ours, run.rewards))
        assert (run.rewards - run.raw_rewards).abs().max() > 0.1

    clipped = []
    for update in run.updates:
        logps, values = update.logps.clone(), update.values.clone()
        policy_loss = ppo_policy_loss(
            logps.requires_grad_(), update.old_logps.to(dtype), update.advantages, update.mask, CLIP
        )
        value_loss = ppo_value_loss(
            values.requires_grad_(), update.old_values, update.returns, update.value_mask, CLIP
        )
        (policy_loss + 0.1 * value_loss).backward()  # TRL's vf_coef
        record_property("PPO loss", assert_close(policy_loss.detach(), update.policy_loss))
        record_property("PPO loss", assert_close(value_loss.detach(), update.value_loss))
        record_property("PPO gradient", assert_close(logps.grad, update.logps_gradient))
        record_property("PPO gradient", assert_close(values.grad, update.values_gradient))
        clipped.append(((logps.grad == 0) & update.mask).sum().item())
    assert clipped[0] == 0 < clipped[1], "the clip must act in the second epoch"


def test_the_kl_part_of_the_rewards_is_ours_and_the_score_stands_one_slot_later(
    ask, dtype, assert_close, record_property
):
    run = ask()
    zeros = torch.zeros_like(run.scores)
    logps = run.logps.to(dtype)
    ours = kl_penalized_rewards(zeros, logps, run.ref_logps, run.mask, BETA)
    record_property("PPO rewards", assert_close(ours, run.kl_rewards))

    ended = run.mask.sum(-1) < run.mask.shape[1]
    assert ended.any() and not ended.all()
    ours = kl_penalized_rewards(run.scores.to(dtype), logps, run.ref_logps, run.mask, BETA)
    assert_close(ours.sum(-1), run.raw_rewards.sum(-1))
    same = (ours - run.raw_rewards).abs().amax(-1) < 1e-6
    assert torch.equal(same, ~ended)  # a cut response has no slot after its last token
