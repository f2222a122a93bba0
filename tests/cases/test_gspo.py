"""Inputs that broke other implementations of GSPO, with their right values."""

import copy
import logging
import math

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from companion.exact import World, expect
from companion.lm import build_tokenizer, checkpoint, load, new_model, token_log_probs
from companion.losses import dapo_loss, dr_grpo_loss, group_advantages, grpo_loss, gspo_loss
from companion.oracle import trl_grpo
from companion.tasks import PRIME_SUMS, problems
from companion.training import train

NAN = math.nan
SEQUENCE = dict(
    num_generations=4, loss_type="grpo", beta=0.0, epsilon=4e-4,
    importance_sampling_level="sequence",
)  # fmt: skip


def t(*values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


def objective(log_ratios, advantage=1.0, epsilon=9.0, pads=0):
    """Ŵ of one response and its gradient by token; NaN under the mask."""
    logps = t([*log_ratios, *[NAN] * pads]).requires_grad_()
    mask = t([1.0] * len(log_ratios) + [0.0] * pads)
    loss = gspo_loss(logps, torch.zeros_like(logps), t(advantage), mask, epsilon)
    (gradient,) = torch.autograd.grad(-loss, logps)
    return loss.neg().item(), gradient[0].tolist()


# The ratio: the geometric mean over real tokens.


@pytest.mark.parametrize(
    "log_ratios, pads, xi",
    [
        ([0.1] * 4, 4, 1.105171),  # over the padded width it would be 1.051271
        ([0.1] * 4, 0, 1.105171),
        ([1.0, -1.0], 0, 1.0),
        ([0.01] * 100, 0, 1.010050),  # the product is 2.718282
        ([0.01] * 100, 28, 1.010050),
        ([0.3], 3, 1.349859),  # one token: its own ratio
        ([0.5, 0.0, -0.2], 1, 1.105171),  # the mean of the ratios is 1.155817
    ],
)
def test_xi_is_the_geometric_mean_over_real_tokens(log_ratios, pads, xi):
    value, gradient = objective(log_ratios, pads=pads)
    assert value == pytest.approx(xi, abs=1e-6)
    real = len(log_ratios)
    assert gradient[:real] == pytest.approx([xi / real] * real, abs=1e-6)
    assert gradient[real:] == [0.0] * pads


def test_a_constant_log_ratio_gives_one_xi_at_any_length_and_the_same_clip():
    mask = torch.arange(128) < torch.tensor([[1], [7], [128]])
    logps = torch.where(mask, t(0.02), t(NAN)).requires_grad_()
    zeros = torch.zeros(3, 128).double()
    for epsilon, each, slope in ((0.03, math.exp(0.02), math.exp(0.02)), (0.01, 1.01, 0.0)):
        loss = gspo_loss(logps, zeros, t(1.0, 1.0, 1.0), mask, epsilon)
        (gradient,) = torch.autograd.grad(loss, logps)
        assert loss.item() == pytest.approx(-each)
        assert gradient.sum(-1).tolist() == pytest.approx([-slope / 3] * 3)


# The clip: a response's tokens are cut together.


@pytest.mark.parametrize(
    "xi, advantage, epsilon, value, slope",
    [
        (1.5, 1.0, 0.2, 1.2, 0.0),
        (1.5, -1.0, 0.2, -1.5, -1.5),
        (0.5, 1.0, 0.2, 0.5, 0.5),
        (0.5, -1.0, 0.2, -0.8, 0.0),
        (1.105171, 1.0, 4e-4, 1.0004, 0.0),
        (1.0003, 1.0, 4e-4, 1.0003, 1.0003),
        (0.9, -1.0, 4e-4, -0.9996, 0.0),
    ],
)
def test_the_four_cases_of_the_clip(xi, advantage, epsilon, value, slope):
    # far apart, so that a clip by token would act on some tokens and not on others
    log_ratios = [math.log(xi) + 1.0, math.log(xi) - 1.0, math.log(xi)]
    got, gradient = objective(log_ratios, advantage, epsilon, pads=2)
    assert got == pytest.approx(value, abs=1e-12)
    assert gradient == pytest.approx([slope / 3] * 3 + [0.0] * 2, abs=1e-12)


# Empty and masked responses.


@pytest.mark.parametrize(
    "lengths, expected", [([2, 0], -0.5), ([0, 2], 0.5), ([0, 0], 0.0), ([1, 2], 0.0)]
)
def test_an_empty_response_counts_as_0_in_the_mean(lengths, expected):
    logps = torch.zeros(2, 2).double().requires_grad_()
    mask = torch.arange(2) < torch.tensor(lengths)[:, None]
    loss = gspo_loss(logps, torch.zeros(2, 2).double(), t(1.0, -1.0), mask, 4e-4)
    (gradient,) = torch.autograd.grad(loss, logps)
    assert loss.item() == pytest.approx(expected)
    assert gradient.isfinite().all() and not gradient[~mask].any()


def test_equal_rewards_teach_nothing():
    advantages = group_advantages(torch.full((7,), 0.1), 7)
    logps = torch.randn(7, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss = gspo_loss(logps, logps.detach() - 0.3, advantages, torch.ones(7, 3), 4e-4)
    loss.backward()
    assert loss.item() == 0 and not logps.grad.any()


# Extremes.


def test_a_large_xi_is_clipped_without_nan():
    logps = t([89.0, 89.0], dtype=torch.float32).requires_grad_()
    zeros, mask = torch.zeros(1, 2), torch.ones(1, 2)
    loss = gspo_loss(logps, zeros, torch.ones(1), mask, 0.2)
    loss.backward()
    assert loss.item() == pytest.approx(-1.2) and logps.grad.tolist() == [[0.0, 0.0]]


@pytest.mark.bad_input
def test_a_large_xi_that_no_clip_bounds_is_refused_with_its_row():
    logps = t([0.0, 0.0], [200.0, -22.0], dtype=torch.float32)  # mean 89, in float32 an infinity
    zeros, mask = torch.zeros(2, 2), torch.ones(2, 2)
    with pytest.raises(ValueError, match=r"at \[1\] is 89\.0: the ratio overflows torch.float32"):
        gspo_loss(logps, zeros, t(1.0, -1.0, dtype=torch.float32), mask, 0.2)


@pytest.mark.bad_input
def test_tokens_that_cancel_are_no_overflow_for_gspo_but_are_for_grpo():
    logps = t([200.0, -200.0], dtype=torch.float32)
    zeros, mask = torch.zeros(1, 2), torch.ones(1, 2)
    assert gspo_loss(logps, zeros, -torch.ones(1), mask, 4e-4).item() == pytest.approx(1.0)
    with pytest.raises(ValueError, match=r"at \[0, 0\] is 200\.0"):
        grpo_loss(logps, zeros, -torch.ones(1), mask, 0.2)


@pytest.mark.bad_input
def test_a_real_token_of_probability_0_is_named():
    logps = t([-1.0, -math.inf, -2.0], [-1.0, -1.0, -1.0])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    old = torch.zeros(2, 3).double()
    with pytest.raises(ValueError, match=r"logps\[0, 1\] is -inf"):
        gspo_loss(logps, old, t(1.0, -1.0), mask, 4e-4)
    mask[0, 1] = 0  # under the mask it does not matter
    assert gspo_loss(logps, old, t(1.0, -1.0), mask, 4e-4).isfinite()


# On policy: the loss prints 0, the gradient is GRPO's.


def test_on_policy_the_loss_is_0_and_the_gradient_is_not():
    advantages = group_advantages(t(1.0, 0.0, 0.0, 0.0), 4)
    lengths = torch.tensor([4, 1, 2, 3])
    mask = torch.arange(4) < lengths[:, None]
    gradients = {}
    for name, loss_of in {
        "gspo": lambda *batch: gspo_loss(*batch, 4e-4),
        "grpo": lambda *batch: grpo_loss(*batch, 0.2),
        "dapo": lambda *batch: dapo_loss(*batch, 0.2, 0.28),
        "dr_grpo": lambda *batch: dr_grpo_loss(*batch, 0.2, 1),
    }.items():
        logps = torch.full((4, 4), -1.3).double().requires_grad_()
        loss = loss_of(logps, logps, advantages, mask)
        (gradients[name],) = torch.autograd.grad(loss, logps)
        if name in ("gspo", "grpo"):
            assert loss.item() == pytest.approx(0, abs=1e-12)
    expected = -(advantages / (4 * lengths))[:, None] * mask
    torch.testing.assert_close(gradients["gspo"], expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradients["grpo"], expected, rtol=0, atol=1e-12)
    for name in ("dapo", "dr_grpo"):  # not even in direction, as the lengths differ
        cosine = torch.cosine_similarity(gradients[name].flatten(), expected.flatten(), 0)
        assert cosine < 0.99


def test_xi_is_no_importance_weight_but_the_product_is():
    world = World(prompts=2, letters=2, max_length=4)
    g = torch.Generator().manual_seed(0)
    old_logits = world.random_logits(g)
    old = world.token_log_probs(old_logits)
    gaps = world.token_log_probs(old_logits + world.random_logits(g, scale=0.5)) - old
    probs, values = old.sum(-1).exp(), world.random_rewards(g)
    xi = (gaps.sum(-1) / world.mask.sum(-1)).exp()
    rows = gspo_loss(gaps[0], torch.zeros_like(gaps[0]), probs[0], world.mask, 99.0)
    assert -rows.item() * len(xi[0]) == pytest.approx(expect(probs, xi)[0].item())  # E_old[ξ]
    assert (expect(probs, xi) - 1).abs().min() > 0.01
    product, new = gaps.sum(-1).exp(), (old + gaps).sum(-1).exp()
    torch.testing.assert_close(expect(probs, product), torch.ones(2).double())
    torch.testing.assert_close(expect(probs, product * values), expect(new, values))
    assert (expect(probs, xi * values) - expect(new, values)).abs().min() > 0.005


# TRL.

PROMPTS = [[9, 8, 7]] * 4 + [[6, 5, 4]] * 4
REWARDS = [1.0, 0.0, 0.0, 0.5, 0.0, 2.0, 1.0, 1.0]


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="module")
def completions(tokenizer):
    """Eight of unequal lengths; the third is cut."""
    g = torch.Generator().manual_seed(0)
    rows = [torch.randint(4, 300, (n,), generator=g).tolist() for n in (0, 5, 6, 2, 1, 7, 3, 4)]
    return [row if i == 2 else [*row, tokenizer.eos_token_id] for i, row in enumerate(rows)]


@pytest.fixture(scope="module")
def models():
    """A policy, and the policy that wrote the completions, in float64."""
    old = new_model(seed=0, dtype=torch.float64)
    model, g = copy.deepcopy(old), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.02 * p.std() * torch.randn(p.shape, generator=g, dtype=p.dtype)
    return model, old


@pytest.fixture(scope="module")
def ask(models, completions, tokenizer):
    def ask(on_policy=False, **config):
        model, old = models
        if not on_policy:
            config.setdefault("num_iterations", 2)
        return trl_grpo(
            old if on_policy else model, old, old, PROMPTS, completions, REWARDS, tokenizer,
            **(SEQUENCE | config),
        )  # fmt: skip

    return ask


def xi_of(models, answer):
    with torch.no_grad():
        new, old = (token_log_probs(lm, **answer.batch) for lm in models)
    mask = answer.batch["completion_mask"]
    return ((new - old).sum(-1) / mask.sum(-1)).exp(), (new - old).exp(), mask


def grad_gap(one, other):
    return max((one.gradients[name] - other.gradients[name]).abs().max() for name in one.gradients)


def test_with_one_update_a_generation_trl_ignores_epsilon_and_level(ask):
    usual = ask(on_policy=True)
    assert usual.loss.item() == pytest.approx(0, abs=1e-6)  # advantages are float32
    assert max(g.abs().max() for g in usual.gradients.values()) > 1e-3
    for config in (dict(epsilon=0.2), dict(importance_sampling_level="token", epsilon=0.2)):
        other = ask(on_policy=True, **config)
        assert grad_gap(usual, other) < 1e-12
        assert other.metrics["clip_ratio/region_mean"] == 0
    dapo = ask(on_policy=True, importance_sampling_level="token", loss_type="dapo")
    assert grad_gap(usual, dapo) > 1e-3


def test_with_stale_data_trl_does_not(ask):
    usual = ask()
    assert 0 < usual.metrics["clip_ratio/region_mean"] < 1
    for config in (dict(epsilon=0.2), dict(importance_sampling_level="token")):
        assert grad_gap(usual, ask(**config)) > 1e-3


def test_trl_counts_clipped_responses_not_tokens(ask, models):
    by_row, by_token = ask(epsilon=0.02), ask(epsilon=0.02, importance_sampling_level="token")
    xi, ratios, mask = xi_of(models, by_row)
    advantages = by_row.advantages.double()

    def beyond(ratio, a):
        return (ratio > 1.02) & (a > 0) | (ratio < 0.98) & (a < 0)

    rows = beyond(xi, advantages).double().mean().item()
    tokens = (beyond(ratios, advantages[:, None]) & (mask == 1)).sum() / mask.sum()
    assert by_row.metrics["clip_ratio/region_mean"] == pytest.approx(rows, abs=1e-6)
    assert by_token.metrics["clip_ratio/region_mean"] == pytest.approx(tokens.item(), abs=1e-6)
    assert abs(rows - tokens) > 0.05


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "luspo"])
def test_only_loss_type_grpo_takes_the_mean_over_responses(ask, models, loss_type, monkeypatch):
    heard = []
    listener = logging.Handler()
    listener.emit = lambda record: heard.append(record.getMessage())
    monkeypatch.setattr(logging.getLogger("trl.trainer.grpo_trainer"), "handlers", [listener])
    answer = ask(epsilon=0.02, loss_type=loss_type, max_completion_length=16)
    xi, _, mask = xi_of(models, answer)
    advantages, lengths = answer.advantages.double(), mask.sum(-1)
    each = torch.minimum(xi * advantages, xi.clamp(0.98, 1.02) * advantages)
    expected = {
        "grpo": each.mean(),
        "dapo": (each * lengths).sum() / lengths.sum(),
        "dr_grpo": (each * lengths).sum() / (8 * 16),
        "luspo": (each * lengths).mean(),
    }
    assert answer.loss.item() == pytest.approx(-expected[loss_type].item(), abs=1e-12)
    assert abs(expected["grpo"] - expected["dapo"]) > 1e-4
    warned = any("loss sums per-token" in text for text in heard)
    assert warned == (loss_type in ("dapo", "dr_grpo"))


def test_a_response_that_trl_masks_counts_as_0(ask):
    answer = ask(on_policy=True, mask_truncated_completions=True)
    mask, advantages = answer.batch["completion_mask"], answer.advantages.double()
    assert mask.sum(-1).tolist().count(0) == 1 and mask[2].sum() == 0
    zeros = torch.zeros(mask.shape).double()
    ours = gspo_loss(zeros, zeros, advantages, mask, 4e-4)
    assert answer.loss.item() == pytest.approx(ours.item(), abs=1e-12)
    assert ours.item() == pytest.approx(advantages[2].item() / 8, abs=1e-6)  # not the page's 0


def test_the_lower_width_is_epsilon_and_the_upper_epsilon_high(ask, models):
    answer = ask(epsilon=0.01, epsilon_high=0.03)
    xi, _, _ = xi_of(models, answer)
    advantages = answer.advantages.double()
    each = torch.minimum(xi * advantages, xi.clamp(0.99, 1.03) * advantages)
    assert answer.loss.item() == pytest.approx(-each.mean().item(), abs=1e-12)
    assert abs(answer.loss - ask(epsilon=0.01).loss) > 1e-4


def test_only_several_updates_a_generation_make_the_clip_act(tmp_path):
    def run(**config):
        arguments = dict(
            output_dir=str(tmp_path), use_cpu=True, bf16=False, gradient_checkpointing=False,
            report_to="none", save_strategy="no", disable_tqdm=True, logging_steps=1, max_steps=2,
            learning_rate=5e-4, max_completion_length=8, per_device_train_batch_size=8,
        )  # fmt: skip
        trainer = GRPOTrainer(
            str(checkpoint("prime-sums")),
            lambda completions, ground_truth, **_: [
                float(y == truth) for y, truth in zip(completions, ground_truth, strict=True)
            ],
            args=GRPOConfig(**(arguments | SEQUENCE | config)),
            processing_class=load("prime-sums")[1],
            train_dataset=problems(PRIME_SUMS, 16, seed=0),
        )
        return train(trainer)["clip_ratio/region_mean"].tolist()

    assert run() == [0, 0]
    assert run(gradient_accumulation_steps=2) == [0, 0]  # still one update a generation
    for config in (dict(steps_per_generation=2), dict(num_iterations=2)):
        first, second = run(**config)
        assert first == 0 < second
