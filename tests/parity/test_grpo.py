"""The GRPO family's losses against TRL's GRPOTrainer: advantages, value, parameter gradients."""

import copy

import pytest
import torch

from companion.lm import token_log_probs
from companion.losses import dapo_loss, dr_grpo_loss, group_advantages, grpo_loss, gspo_loss
from companion.oracle import trl_grpo

G = 4
REWARDS = [1.0, 0.0, 0.0, 0.0, 0.5, -1.25, 0.0, 2.0, 1.0, None, 0.0, 1.0]  # three groups

# method: (TRL's switches, our loss, how the advantages are scaled). Sizes of β and of the weights
# are such that gradients are of size 1, where float32's tolerance means something.
METHODS = {
    "GRPO": (
        dict(loss_type="grpo", epsilon=0.2),
        lambda logps, old, ref, a, mask: grpo_loss(logps, old, a, mask, 0.2),
        "group",
    ),
    "GRPO with KL": (
        dict(loss_type="grpo", epsilon=0.2, beta=0.04, use_bias_correction_kl=False),
        lambda logps, old, ref, a, mask: grpo_loss(logps, old, a, mask, 0.2, ref, 0.04),
        "group",
    ),
    "Dr. GRPO": (
        dict(loss_type="dr_grpo", epsilon=0.2, max_completion_length=16, scale_rewards="none"),
        lambda logps, old, ref, a, mask: dr_grpo_loss(logps, old, a, mask, 0.2, 16),
        "none",
    ),
    "DAPO": (
        dict(loss_type="dapo", epsilon=0.2, epsilon_high=0.28),
        lambda logps, old, ref, a, mask: dapo_loss(logps, old, a, mask, 0.2, 0.28),
        "group",
    ),
    "GSPO": (
        dict(loss_type="grpo", importance_sampling_level="sequence", epsilon=4e-4),
        lambda logps, old, ref, a, mask: gspo_loss(logps, old, a, mask, 4e-4),
        "group",
    ),
}


@pytest.fixture
def groups(tokenizer):
    """Prompts and completions by seed: three groups, unequal lengths, one completion cut.

    The prompts have one length: TRL counts positions over the left padding, and a rotary angle is
    a float32 whatever the model's dtype, so padding moves log-probs by 1e-7.
    """

    def make(seed):
        g = torch.Generator().manual_seed(seed)

        def ids(length):
            return torch.randint(4, len(tokenizer), (length,), generator=g).tolist()

        prompts = [prompt for _ in range(len(REWARDS) // G) for prompt in [ids(5)] * G]
        lengths = torch.randint(0, 9, (len(prompts),), generator=g).tolist()
        completions = [ids(n) + [tokenizer.eos_token_id] for n in lengths]
        completions[seed] = ids(9)
        return prompts, completions

    return make


def moved(model, seed, scale=0.02):
    """The model some updates ago: close enough that not everything is clipped."""
    old, g = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in old.parameters():
            p += scale * p.std() * torch.randn(p.shape, generator=g, dtype=torch.float64).to(p)
    return old


def log_probs_of(models, batch, temperature=1.0):
    model, old_model, ref_model = models
    with torch.no_grad():
        old, ref = (
            token_log_probs(lm, **batch, temperature=temperature) for lm in (old_model, ref_model)
        )
    return token_log_probs(model, **batch, temperature=temperature), old, ref


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", range(3))
def test_our_loss_equals_trl(
    seed, method, groups, random_model, dtype, tokenizer, assert_parity, record_property
):
    config, loss_of, scale = METHODS[method]
    prompts, completions = groups(seed)
    model = random_model(seed, 1.6)
    models = model, moved(model, seed + 11), moved(model, seed + 50, 0.2)
    theirs = trl_grpo(
        *models, prompts, completions, REWARDS, tokenizer,
        num_generations=G, num_iterations=2, **({"beta": 0.0} | config),
    )  # fmt: skip

    advantages = group_advantages(REWARDS, G, scale)
    gap = (advantages - theirs.advantages).abs().max().item()
    record_property(f"{method} advantages", gap)
    assert gap <= 1e-6 and (advantages > 0).any() and (advantages < 0).any()
    mask = theirs.batch["completion_mask"]
    assert mask.sum(-1).unique().numel() > 1

    logps, old, ref = log_probs_of(models, theirs.batch)
    loss = loss_of(logps, old, ref, theirs.advantages.to(dtype), mask)
    loss.backward()
    clipped = theirs.metrics["clip_ratio/low_mean"], theirs.metrics["clip_ratio/high_mean"]
    assert 0 < min(clipped) and sum(clipped) < 1, "both sides of the clip must act, on some"
    assert_parity(method, model, loss, theirs)


@pytest.mark.parametrize("method", METHODS)
def test_on_policy_the_loss_is_trls_too(
    method, groups, random_model, dtype, tokenizer, assert_parity
):
    config, loss_of, _ = METHODS[method]
    prompts, completions = groups(0)
    model = random_model(0, 1.6)
    ref_model = moved(model, 50, 0.2)
    theirs = trl_grpo(
        model, model, ref_model, prompts, completions, REWARDS, tokenizer,
        num_generations=G, **({"beta": 0.0} | config),
    )  # fmt: skip
    logps, old, ref = log_probs_of((model, model, ref_model), theirs.batch)
    mask = theirs.batch["completion_mask"]
    loss = loss_of(logps, old, ref, theirs.advantages.to(dtype), mask)
    loss.backward()
    assert theirs.metrics["clip_ratio/region_mean"] == 0
    assert_parity(method, model, loss, theirs)


@pytest.mark.parametrize("temperature", [0.6, 1.5])
def test_a_temperature_divides_the_logits_of_all_three_models(
    temperature, groups, random_model, dtype, tokenizer, assert_parity
):
    prompts, completions = groups(1)
    model = random_model(0, 1.6)
    models = model, moved(model, 3), moved(model, 50, 0.2)
    config, loss_of, _ = METHODS["GRPO with KL"]
    theirs = trl_grpo(
        *models, prompts, completions, REWARDS, tokenizer,
        num_generations=G, num_iterations=2, temperature=temperature, **config,
    )  # fmt: skip
    logps, old, ref = log_probs_of(models, theirs.batch, temperature)
    loss = loss_of(logps, old, ref, theirs.advantages.to(dtype), theirs.batch["completion_mask"])
    loss.backward()
    assert_parity("GRPO with KL", model, loss, theirs)


def test_left_padding_moves_trls_log_probs_by_no_more_than_rounding(
    random_ids, random_model, tokenizer
):
    prompts, completions = random_ids(0, responses=1)
    prompts = [prompt for prompt in prompts[:3] for _ in range(2)]
    assert len({len(prompt) for prompt in prompts}) > 1
    model = random_model(0, 1.6)
    theirs = trl_grpo(
        model, model, model, prompts, completions, [1.0, 0.0] * 3, tokenizer,
        num_generations=2, loss_type="grpo", beta=0.0,
    )  # fmt: skip
    logps, old, ref = log_probs_of((model, model, model), theirs.batch)
    loss = grpo_loss(
        logps, old, theirs.advantages.to(logps.dtype), theirs.batch["completion_mask"], 0.2
    )
    loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(
            p.grad, theirs.gradients[name], rtol=1e-6, atol=1e-6, check_dtype=False
        )
