"""Inputs that broke other implementations of DAPO, with their right values.

Run as a script: one of several processes (see the test of two processes).
"""

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import PartialState
from datasets import Dataset
from safetensors.torch import load_file, save_file
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import get_soft_overlong_punishment

from companion.lm import checkpoint, load, token_log_probs
from companion.losses import (
    dapo_loss,
    degenerate_groups,
    group_advantages,
    grpo_loss,
    overlong_penalty,
)
from companion.oracle import trl_grpo
from companion.rewards import exact_match, overlong_reward
from companion.tasks import PRIME_SUMS
from companion.training import DynamicSamplingGRPOTrainer, train

F64 = torch.float64
G = 4
SWITCHES = dict(loss_type="dapo", beta=0.0, epsilon=0.2, epsilon_high=0.28, num_generations=G)

# Two prompts of one length, four answers each: unequal lengths, the last one cut.
ANSWERS = {
    "20未満の素数の合計は？": ["77", "7", "1160012", "78"],
    "50未満の素数の合計は？": ["328", "328", "1", "11600128"],
}


def t(*values):
    return torch.tensor(values, dtype=F64)


def rows_of(*lengths):
    """A mask of right-padded rows."""
    return torch.arange(max(max(lengths), 1)) < torch.tensor(lengths)[:, None]


def on_policy(advantages, lengths, num_tokens=None):
    """Loss and gradient of log-probs 0 whose ratio is 1."""
    mask = rows_of(*lengths)
    logps = torch.zeros(mask.shape, dtype=F64, requires_grad=True)
    loss = dapo_loss(logps, torch.zeros_like(logps), advantages, mask, 0.2, 0.28, num_tokens)
    (gradient,) = torch.autograd.grad(loss, logps)
    return loss.item(), gradient


def completion_ids(tokenizer):
    ids = {p: tokenizer(texts)["input_ids"] for p, texts in ANSWERS.items()}
    return {
        p: [row if len(row) > 7 else [*row, tokenizer.eos_token_id] for row in rows]
        for p, rows in ids.items()
    }


# The mean over tokens, of any split of the batch.


def test_token_mean_and_mean_of_means():
    # token losses [1] and [3, 3, 3]: on policy a token's loss is minus its advantage
    assert on_policy(t(-1.0, -3.0), [1, 3])[0] == pytest.approx(2.5)
    parts = [(t(-1.0), [1]), (t(-3.0), [3])]
    assert sum(on_policy(*part, num_tokens=4)[0] for part in parts) == pytest.approx(2.5)
    means = [on_policy(*part)[0] for part in parts]
    assert sum(means) / 2 == pytest.approx(2.0)  # wrong, as is a division by both:
    assert sum(on_policy(*part, num_tokens=4)[0] for part in parts) / 2 == pytest.approx(1.25)


@pytest.mark.parametrize("sizes", [[8], [4, 4], [1, 7], [3, 3, 2], [1] * 8])
@pytest.mark.parametrize("count", [int, torch.tensor], ids=["int", "tensor"])
def test_the_parts_sum_to_the_whole(sizes, count):
    g = torch.Generator().manual_seed(0)
    logps, old_logps = -torch.rand(2, 8, 5, generator=g, dtype=F64)
    advantages = torch.randn(8, generator=g, dtype=F64)
    mask = rows_of(5, 1, 2, 5, 0, 3, 4, 1)
    batch = logps, old_logps, advantages, mask
    expected = 0.0
    for i, t in mask.nonzero().tolist():
        w, a = math.exp(logps[i, t] - old_logps[i, t]), advantages[i].item()
        expected -= min(w * a, min(max(w, 0.8), 1.28) * a) / mask.sum().item()
    total = count(mask.sum().item())
    parts = zip(*(x.split(sizes) for x in batch), strict=True)
    losses = [dapo_loss(*part, 0.2, 0.28, num_tokens=total).item() for part in parts]
    assert sum(losses) == pytest.approx(expected, abs=1e-12)


def test_one_mean_of_all_prompts_or_one_of_each():
    # 4 tokens of loss 1 and 12 of loss 0, each a prompt of its own
    assert on_policy(t(-1.0, 0.0), [4, 12])[0] == pytest.approx(0.25)
    each = [on_policy(t(-1.0), [4])[0], on_policy(t(0.0), [12])[0]]
    assert sum(each) / 2 == pytest.approx(0.5)


@pytest.mark.parametrize(
    "lengths, expected", [([2, 0], -1.0), ([0, 2], 1.0), ([0, 0], 0.0), ([2, 8], 0.6)]
)
def test_empty_and_unequal_responses(lengths, expected):
    loss, gradient = on_policy(t(1.0, -1.0), lengths)
    assert loss == pytest.approx(expected)
    assert torch.isfinite(gradient).all() and (gradient[~rows_of(*lengths)] == 0).all()


def test_the_printed_loss_is_neither_0_nor_the_progress():
    advantages = group_advantages(t(1.0, 0.0, 0.0, 0.0), 4)
    loss, gradient = on_policy(advantages, [4, 1, 2, 3])
    assert loss == pytest.approx(-0.3 * 0.5 / (0.5 + 1e-4))
    by_hand = torch.where(rows_of(4, 1, 2, 3), -advantages[:, None] / 10, 0.0)
    assert torch.allclose(gradient, by_hand, rtol=0, atol=1e-15)


# The clip, wider above than below.


@pytest.mark.parametrize(
    "ratio, advantage, high, objective, slope",
    [
        (1.5, 1.0, 0.2, 1.2, 0.0), (1.5, -1.0, 0.2, -1.5, -1.5),
        (0.5, 1.0, 0.2, 0.5, 0.5), (0.5, -1.0, 0.2, -0.8, 0.0),
        (1.25, 1.0, 0.2, 1.2, 0.0), (1.25, 1.0, 0.28, 1.25, 1.25),
        (1.5, 1.0, 0.28, 1.28, 0.0), (1.5, -1.0, 0.28, -1.5, -1.5),
        (0.75, -1.0, 0.28, -0.8, 0.0),
    ],
)  # fmt: skip
def test_the_two_sides_have_their_own_widths(ratio, advantage, high, objective, slope):
    logps = t([math.log(ratio)]).requires_grad_()
    loss = dapo_loss(logps, t([0.0]), t(advantage), rows_of(1), 0.2, high)
    (gradient,) = torch.autograd.grad(-loss, logps)
    assert -loss.item() == pytest.approx(objective, abs=1e-12)
    assert gradient.item() == pytest.approx(slope, abs=1e-12)


@pytest.mark.parametrize("high, border", [(0.2, 0.8333), (0.28, 0.7813)])
def test_above_a_border_the_upper_clip_cannot_act(high, border):
    def slope(old):
        logps = t([math.log(1 - 1e-9)]).requires_grad_()  # as likely as can be
        loss = dapo_loss(logps, t([math.log(old)]), t(1.0), rows_of(1), 0.2, high)
        return torch.autograd.grad(-loss, logps)[0].item()

    assert slope(border - 1e-3) == 0 and slope(border + 1e-3) == pytest.approx(1 + high, rel=0.01)


def test_an_overflowing_ratio_is_clipped_where_it_can_be():
    huge = torch.tensor([[89.0]], requires_grad=True)  # e^89 is infinite in float32
    zero, one = torch.zeros(1, 1), torch.ones(1, 1)
    loss = dapo_loss(huge, zero, torch.ones(1), one, 0.2, 0.28)
    (gradient,) = torch.autograd.grad(loss, huge)
    assert loss.item() == pytest.approx(-1.28) and gradient.item() == 0
    with pytest.raises(ValueError, match=r"\[0, 0\] is 89"):
        dapo_loss(huge, zero, -torch.ones(1), one, 0.2, 0.28)


@pytest.mark.parametrize("bad", [-math.inf, math.nan])
def test_a_log_prob_of_minus_infinity_is_named(bad):
    logps, zero = t([-1.0, 0.0], [-2.0, bad]), torch.zeros(2, 2, dtype=F64)
    with pytest.raises(ValueError, match=r"^logps\[1, 1\] is (-inf|nan)"):
        dapo_loss(logps, zero, t(1.0, -1.0), rows_of(2, 2), 0.2, 0.28)
    assert dapo_loss(logps, zero, t(1.0, -1.0), rows_of(2, 1), 0.2, 0.28).isfinite()


# Groups without a difference.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value, size", [(1.0, 4), (0.1, 7), (0.0, 2)])
def test_equal_rewards_teach_nothing_and_are_reported(dtype, value, size):
    rewards = torch.full((size,), value, dtype=dtype)
    assert degenerate_groups(rewards, size).tolist() == [True]
    loss, gradient = on_policy(group_advantages(rewards, size).double(), [3] * size)
    assert loss == 0 and (gradient == 0).all()


@pytest.mark.parametrize("size, share", [(2, 0.702), (4, 0.449), (8, 0.201), (16, 0.040)])
def test_share_of_groups_without_a_difference(size, share):
    p = 0.1819
    groups = t(*itertools.product((0.0, 1.0), repeat=size))  # all of them
    chance = (p ** groups.sum(1)) * (1 - p) ** (size - groups.sum(1))
    same = degenerate_groups(groups.flatten(), size)
    assert (chance * same).sum().item() == pytest.approx(share, abs=5e-4)


def test_interleaved_prompts_are_grouped_by_prompt():
    rewards, prompts = [1.0, 0.0, 1.0, 0.0], ["A", "B", "A", "B"]
    assert group_advantages(rewards, 2, prompts=prompts).tolist() == [0, 0, 0, 0]
    blind = group_advantages(rewards, 2)
    assert blind.tolist() == pytest.approx([0.707007, -0.707007] * 2, abs=1e-6)


# The reward for length.


@pytest.mark.parametrize(
    "length, expected", [(0, 0), (80, 0), (81, -0.05), (90, -0.5), (100, -1), (101, -1), (500, -1)]
)
def test_overlong_penalty_by_hand(length, expected):
    assert overlong_penalty(torch.tensor(length), 100, 20).item() == pytest.approx(expected)
    ids = [[5] * length]
    assert overlong_reward(100, 20)(completions=[""], completion_ids=ids) == [
        pytest.approx(expected)
    ]


@pytest.mark.parametrize("max_length, cache", [(16, 4), (100, 20), (7, 7), (10, 3), (5, 0)])
def test_trls_punishment_is_the_same(max_length, cache):
    ids = [[5] * n for n in range(max_length + 3)]
    theirs = get_soft_overlong_punishment(max_length, cache)(completion_ids=ids)
    ours = overlong_reward(max_length, cache)(completions=[""] * len(ids), completion_ids=ids)
    assert ours == pytest.approx(theirs, abs=1e-12)


@pytest.mark.parametrize("correct", [1.0, 0.0])
def test_the_penalty_alone_makes_advantages_of_full_size(correct):
    lengths, rewards = torch.tensor([80, 80, 80, 81]), torch.full((4,), correct, dtype=F64)
    total = rewards + overlong_penalty(lengths.double(), 100, 20)
    assert degenerate_groups(rewards, 4).all() and not degenerate_groups(total, 4).any()
    # mean −.0125, std .025 of the penalties 0, 0, 0, −.05
    expected = [0.0125 / (0.025 + 1e-4)] * 3 + [-0.0375 / (0.025 + 1e-4)]
    assert group_advantages(total, 4).tolist() == pytest.approx(expected, abs=1e-6)


# TRL owns these.


@pytest.fixture(scope="module")
def tokenizer():
    return load("prime-sums")[1]


@pytest.fixture(scope="module")
def models():
    """A policy, in float64, and a slightly different one that wrote the answers."""
    model, old_model = (load("prime-sums", dtype=F64)[0] for _ in range(2))
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in old_model.parameters():
            p += 0.1 * p.std() * torch.randn(p.shape, generator=g, dtype=F64)
    return model, old_model


def ask_trl(models, tokenizer, rewards, **changes):
    model, old_model = models
    ids = completion_ids(tokenizer)
    prompts = tokenizer([p for p in ids for _ in range(G)])["input_ids"]
    config = SWITCHES | dict(num_iterations=2) | changes
    return trl_grpo(model, old_model, model, prompts, sum(ids.values(), []), rewards, tokenizer,
                    **config)  # fmt: skip


def log_probs_of(models, batch):
    with torch.no_grad():
        return [token_log_probs(lm, **batch) for lm in models]


REWARDS = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0]


def test_trl_takes_one_mean_of_all_prompts(models, tokenizer):
    theirs = ask_trl(models, tokenizer, REWARDS)
    logps, old_logps = log_probs_of(models, theirs.batch)
    mask, advantages = theirs.batch["completion_mask"], theirs.advantages.double()
    assert mask.sum(1).tolist() == [3, 2, 8, 3, 4, 4, 2, 8]
    each = [
        dapo_loss(logps[k], old_logps[k], advantages[k], mask[k], 0.2, 0.28).item()
        for k in (slice(0, 4), slice(4, 8))
    ]
    # 16 and 18 tokens
    assert theirs.loss.item() == pytest.approx((16 * each[0] + 18 * each[1]) / 34, abs=1e-12)
    assert abs(theirs.loss.item() - sum(each) / 2) > 1e-3


def test_trl_keeps_groups_without_a_difference_in_the_denominator(models, tokenizer):
    theirs = ask_trl(models, tokenizer, REWARDS[:4] + [1.0] * 4)
    assert theirs.metrics["frac_reward_zero_std"] == 0.5
    logps, old_logps = log_probs_of(models, theirs.batch)
    mask, advantages = theirs.batch["completion_mask"], theirs.advantages.double()
    kept = dapo_loss(logps[:4], old_logps[:4], advantages[:4], mask[:4], 0.2, 0.28).item()
    assert kept != 0 and theirs.loss.item() == pytest.approx(kept * 16 / 34, abs=1e-12)


def test_a_masked_cut_completion_still_shapes_the_baseline(models, tokenizer):
    kept, masked = (
        ask_trl(models, tokenizer, REWARDS, mask_truncated_completions=mask)
        for mask in (False, True)
    )
    assert torch.equal(kept.advantages, masked.advantages)
    assert kept.batch["completion_mask"].sum(1)[[2, 7]].tolist() == [8, 8]
    assert masked.batch["completion_mask"].sum(1)[[2, 7]].tolist() == [8, 0]
    logps, old_logps = (rows[:7] for rows in log_probs_of(models, kept.batch))
    advantages, mask = kept.advantages[:7].double(), kept.batch["completion_mask"][:7]
    ours = dapo_loss(logps, old_logps, advantages, mask, 0.2, 0.28)
    assert masked.loss.item() == pytest.approx(ours.item(), abs=1e-12)


def test_with_one_update_a_generation_no_clip_acts(models, tokenizer):
    once = [
        ask_trl(models, tokenizer, REWARDS, num_iterations=1, epsilon_high=high)
        for high in (0.28, 9.0)
    ]
    assert once[0].loss == once[1].loss
    for name, gradient in once[0].gradients.items():
        assert torch.equal(gradient, once[1].gradients[name])
    assert once[0].metrics["clip_ratio/region_mean"] == 0
    assert ask_trl(models, tokenizer, REWARDS).metrics["clip_ratio/region_mean"] > 0


def test_the_defaults_are_dapos_mean_without_the_rest(tmp_path):
    defaults = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False)
    assert defaults.loss_type == "dapo" and defaults.epsilon_high is None
    assert defaults.beta == 0 and not defaults.mask_truncated_completions


class Recorder(GRPOTrainer):
    """Keeps what each loss was computed from."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.parts = []

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        ids, mask = inputs["completion_ids"], inputs["completion_mask"]
        self.parts.append(
            dict(
                rows=[row[m == 1].tolist() for row, m in zip(ids, mask, strict=True)],
                advantages=inputs["advantages"].tolist(),
                num_items=inputs["num_items_in_batch"].item(),
            )
        )
        return loss


def run_trl(folder, size, parts, steps=1, **config):
    """One run on the eight answers: the history, the trainer."""
    tokenizer = load("prime-sums")[1]
    ids = completion_ids(tokenizer)

    def rollout(prompts, trainer):
        first = trainer.accelerator.process_index * len(prompts)
        written = [ids[p][(first + i) % G] for i, p in enumerate(prompts)]
        return dict(
            prompt_ids=tokenizer(prompts)["input_ids"], completion_ids=written, logprobs=None
        )

    rows = [{"prompt": p, "ground_truth": PRIME_SUMS.answer(p)} for p in ANSWERS]
    arguments = dict(
        output_dir=str(folder), use_cpu=True, bf16=False, gradient_checkpointing=False,
        report_to="none", save_strategy="no", disable_tqdm=True, logging_steps=1,
        optim="sgd", learning_rate=0.01, lr_scheduler_type="constant", max_grad_norm=1e6,
        max_steps=steps, per_device_train_batch_size=size, gradient_accumulation_steps=parts,
    )  # fmt: skip
    trainer = Recorder(
        str(checkpoint("prime-sums")), exact_match,
        args=GRPOConfig(**(arguments | SWITCHES | config)), processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows), rollout_func=rollout,
    )  # fmt: skip
    return train(trainer), trainer


def parameters_of(trainer):
    model = trainer.accelerator.unwrap_model(trainer.model)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def ours_of(parts):
    """dapo_loss of each part with the tokens of all, on policy, and the sum."""
    losses = [
        on_policy(t(*part["advantages"]), [len(row) for row in part["rows"]], part["num_items"])[0]
        for part in parts
    ]
    return sum(losses)


@pytest.fixture(scope="module")
def at_once(tmp_path_factory):
    history, trainer = run_trl(tmp_path_factory.mktemp("at_once"), 8, 1)
    return history.iloc[0], parameters_of(trainer)


@pytest.mark.parametrize("size, parts", [(4, 2), (2, 4)])
def test_accumulation_changes_nothing(tmp_path, at_once, size, parts):
    row, parameters = at_once
    history, trainer = run_trl(tmp_path, size, parts)
    assert len(trainer.parts) == parts
    assert history["loss"][0] == pytest.approx(row["loss"], abs=1e-6)
    assert history["loss"][0] == pytest.approx(ours_of(trainer.parts), abs=1e-6)
    assert history["grad_norm"][0] == pytest.approx(row["grad_norm"], rel=1e-5)
    assert (parameters_of(trainer) - parameters).abs().max() <= 1e-6


def test_the_mean_of_means_is_another_loss(tmp_path, at_once):
    # TRL has it under the name bnpo
    losses = {
        parts: run_trl(tmp_path, 8 // parts, parts, loss_type="bnpo")[0]["loss"][0]
        for parts in (1, 4)
    }
    assert losses[1] == pytest.approx(at_once[0]["loss"], abs=1e-6)
    assert abs(losses[4] - losses[1]) > 1e-3


def test_several_steps_of_one_generation_share_its_tokens(tmp_path, at_once):
    history, trainer = run_trl(
        tmp_path, 4, 1, steps=2, steps_per_generation=2, learning_rate=0.0
    )
    for loss, part in zip(history["loss"], trainer.parts, strict=True):
        half = part | {"num_items": part["num_items"] // 2}  # since TRL 1.10.0
        assert loss == pytest.approx(ours_of([half]), abs=1e-6)
    assert history["loss"].mean() == pytest.approx(at_once[0]["loss"], abs=1e-6)


LAYOUTS = [(4, 1), (2, 2)]  # rows a device, parts; times two processes


def as_one_of_two(folder):
    for size, parts in LAYOUTS:
        history, trainer = run_trl(folder, size, parts)
        name = f"{size}-{parts}-{trainer.accelerator.process_index}"
        save_file({"all": parameters_of(trainer)}, folder / f"{name}.safetensors")
        logged = history[["loss", "grad_norm"]].iloc[0].to_dict()
        figures = logged | dict(processes=trainer.accelerator.num_processes, parts=trainer.parts)
        (folder / f"{name}.json").write_text(json.dumps(figures), encoding="utf-8")


def test_two_processes_change_nothing(tmp_path, at_once):
    row, parameters = at_once
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*command, __file__, str(tmp_path)], env=os.environ | {"ACCELERATE_USE_CPU": "true"},
        capture_output=True, text=True, timeout=240, encoding="utf-8",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    expected = sorted(sum(completion_ids(load("prime-sums")[1]).values(), []))
    for size, parts in LAYOUTS:
        names = [tmp_path / f"{size}-{parts}-{rank}" for rank in range(2)]
        both = [json.loads(n.with_suffix(".json").read_text(encoding="utf-8")) for n in names]
        assert [found["processes"] for found in both] == [2, 2]
        assert [len(found["parts"]) for found in both] == [parts, parts]
        seen = [part for found in both for part in found["parts"]]
        assert sorted(row for part in seen for row in part["rows"]) == expected
        assert both[0]["loss"] == pytest.approx(row["loss"], abs=1e-6)
        assert both[0]["loss"] == pytest.approx(ours_of(seen), abs=1e-6)
        assert both[0]["grad_norm"] == pytest.approx(row["grad_norm"], rel=1e-5)
        for name in names:
            found = load_file(name.with_suffix(".safetensors"))["all"]
            assert (found - parameters).abs().max() <= 1e-6


# Dynamic sampling, which TRL lacks.


@pytest.mark.parametrize(
    "right, words",
    [(True, "of 6 groups drawn 6 were all right, 0 all wrong"),
     (False, "of 6 groups drawn 0 were all right, 6 all wrong")],
)  # fmt: skip
@pytest.mark.parametrize("penalty", [False, True])
def test_data_without_a_difference_ends_with_the_counts(tmp_path, right, words, penalty):
    def judge(completions, **columns):
        return [float(right)] * len(completions)

    rows = [{"prompt": p} for p in ANSWERS]
    trainer = DynamicSamplingGRPOTrainer(
        str(checkpoint("prime-sums")),
        [judge, overlong_reward(8, 8)] if penalty else judge,  # judged before the penalty
        args=GRPOConfig(
            str(tmp_path), use_cpu=True, bf16=False, gradient_checkpointing=False,
            report_to="none", save_strategy="no", disable_tqdm=True, logging_steps=1, max_steps=1,
            per_device_train_batch_size=8, max_completion_length=8, **SWITCHES,
        ),
        processing_class=load("prime-sums")[1], train_dataset=Dataset.from_list(rows),
        max_rounds=3,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match=words):
        train(trainer)


def test_with_equal_widths_and_lengths_dapo_is_grpo():
    g = torch.Generator().manual_seed(0)
    logps, old_logps = -torch.rand(2, 4, 5, generator=g, dtype=F64)
    batch = logps, old_logps, t(1.0, -1.0, 0.5, -0.5), rows_of(5, 5, 5, 5)
    assert dapo_loss(*batch, 0.2, 0.2).item() == pytest.approx(grpo_loss(*batch, 0.2).item())


if __name__ == "__main__":
    as_one_of_two(Path(sys.argv[1]))
    PartialState().wait_for_everyone()
    os._exit(0)  # torch's way out may deadlock: gloo's threads want Python's lock while it waits
