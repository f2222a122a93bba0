"""Batches of a real trainer on the shipped model. Run as a script: one of several processes."""

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

from companion.lm import checkpoint, load, token_log_probs
from companion.tasks import PRIME_SUMS
from companion.training import DynamicSamplingGRPOTrainer, train

G = 4
# Correctness by a row's place in its group, so that a test knows what must come out.
PATTERNS = {
    "mixed": [1.0, 0.0, 0.0, 1.0],
    "mixed of three": [None, 0.0, 1.0, 0.0],
    "right": [1.0] * G,
    "right of two": [None, 1.0, None, 1.0],
    "wrong": [0.0] * G,
    "one scored": [None, None, 1.0, None],
    "none scored": [None] * G,
}
PENALTY = [0.0, -0.25, -0.5, -1.0]


def places(rows):
    """The place in its group of each row of this process."""
    first = PartialState().process_index * rows
    return [i % G for i in range(first, first + rows)]


def by_pattern(pattern, **kwargs):
    return [PATTERNS[name][i] for name, i in zip(pattern, places(len(pattern)), strict=True)]


def penalty(prompts, **kwargs):
    return [PENALTY[i] for i in places(len(prompts))]


def exact(completions, answer, **kwargs):
    return [float(a == b) for a, b in zip(completions, answer, strict=True)]


def rows_of(**counts):
    """So many prompts of each pattern, of one to three digits."""
    patterns = [name.replace("_", " ") for name, n in counts.items() for _ in range(n)]
    limits = [5, 50, 100, 9, 60, 101, *range(11, 50)]
    return [
        {"prompt": f"{n}未満の素数の合計は？", "pattern": p}
        for n, p in zip(limits, patterns, strict=False)
    ]


PRIMES = [{"prompt": p, "answer": PRIME_SUMS.answer(p)} for p in PRIME_SUMS.train_prompts]


class Recorder(DynamicSamplingGRPOTrainer):
    """Keeps every generated batch and what the loss is computed from."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.batches, self.micro_batches = [], []

    def _generate_and_score_completions(self, inputs):
        self.batches.append(super()._generate_and_score_completions(inputs))
        return self.batches[-1]

    def _compute_loss(self, model, inputs):
        self.micro_batches.append(inputs)
        return super()._compute_loss(model, inputs)


def make(
    folder, rows, reward_funcs=by_pattern, *, trainer=Recorder, tokenizer=None, eval_rows=None,
    rollout_func=None, correctness=None, max_rounds=None, **config,
):  # fmt: skip
    arguments = dict(
        output_dir=str(folder), use_cpu=True, bf16=False, gradient_checkpointing=False,
        report_to="none", save_strategy="no", disable_tqdm=True, logging_steps=1, max_steps=1,
        learning_rate=0.0, num_generations=G, per_device_train_batch_size=4 * G,
        max_completion_length=8, loss_type="dapo", beta=0.0,
    )  # fmt: skip
    own = dict(correctness=correctness, max_rounds=max_rounds)
    return trainer(
        model=str(checkpoint("prime-sums")),
        reward_funcs=reward_funcs,
        args=GRPOConfig(**(arguments | config)),
        processing_class=tokenizer or load("prime-sums")[1],
        train_dataset=Dataset.from_list(rows) if isinstance(rows, list) else rows,
        eval_dataset=eval_rows and Dataset.from_list(eval_rows),
        rollout_func=rollout_func,
        **{name: value for name, value in own.items() if value is not None},
    )


def draw(trainer):
    """The trainer's first batch, before it is shuffled and split."""
    trainer.model.train()
    return trainer._generate_and_score_completions(next(iter(trainer.get_train_dataloader())))


def figures(trainer):
    prefix = "dynamic_sampling/"
    return {
        name.removeprefix(prefix): values
        for name, values in trainer._metrics["train"].items()
        if name.startswith(prefix)
    }


def prompts_of(batch):
    """The prompt of each group; the rows of a group have one prompt."""
    texts = load("prime-sums")[1].batch_decode(batch["prompt_ids"], skip_special_tokens=True)
    assert all(len(set(texts[i : i + G])) == 1 for i in range(0, len(texts), G))
    return texts[::G]


def prompts_with(rows, *patterns):
    return [row["prompt"] for row in rows if row["pattern"] in patterns]


# What is in a batch.


def test_a_batch_holds_whole_mixed_groups_and_no_prompt_twice(tmp_path):
    # As all twelve prompts come before any comes again, the four mixed ones come once each.
    rows = rows_of(mixed=4, right=3, wrong=5)
    trainer = make(tmp_path, rows)
    batch = draw(trainer)
    assert sorted(prompts_of(batch)) == sorted(prompts_with(rows, "mixed"))
    assert batch["completion_ids"].shape[0] == 4 * G

    # mean 1/2, std 1/√3
    a = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    assert batch["advantages"].tolist() == pytest.approx([a, -a, -a, a] * 4, abs=1e-6)
    assert batch["num_items_in_batch"] == batch["completion_mask"].sum()
    assert batch["num_items_in_batch"].shape == ()

    # prompts of 11 to 13 characters: padded on the left, completions on the right
    for name, step in (("prompt", 1), ("completion", -1)):
        ids, mask = batch[f"{name}_ids"], batch[f"{name}_mask"]
        assert 0 < mask.sum(1).min() < mask.sum(1).max() == ids.shape[1]
        assert (mask.diff(dim=1) * step >= 0).all()
        assert (ids[mask == 0] == trainer.processing_class.pad_token_id).all()
        assert (ids[mask == 1] != trainer.processing_class.pad_token_id).all()

    rounds = figures(trainer)["extra_rounds"][0] + 1
    assert rounds in (2, 3)
    assert figures(trainer)["dropped_share"] == [pytest.approx(1 - 1 / rounds)]
    assert len(trainer._metrics["train"]["reward"]) == rounds  # TRL's, one a round


def test_shares_count_what_was_drawn(tmp_path):
    # two rounds of four draw all eight
    trainer = make(tmp_path, rows_of(mixed=3, mixed_of_three=1, right=1, wrong=2, one_scored=1))
    trainer.max_rounds = 2
    draw(trainer)
    assert figures(trainer) == {
        "dropped_share": [0.5],
        "all_right_share": [0.125],
        "all_wrong_share": [0.25],
        "extra_rounds": [1],
    }


def test_what_is_too_much_is_cut(tmp_path):
    rows = rows_of(wrong=1, mixed=7)
    trainer = make(tmp_path, rows, shuffle_dataset=False)
    batch = draw(trainer)
    prompts = prompts_of(batch)
    assert prompts[:3] == prompts_with(rows, "mixed")[:3]  # of the first round
    assert len(prompts) == 4 and prompts[3] in prompts_with(rows, "mixed")[3:]
    assert len(batch["advantages"]) == 4 * G
    assert batch["num_items_in_batch"] == batch["completion_mask"].sum()


def test_a_batch_without_degenerate_groups_is_trls_own(tmp_path):
    rows = rows_of(mixed=6)
    torch.manual_seed(0)
    ours = draw(make(tmp_path, rows))
    torch.manual_seed(0)
    theirs = draw(make(tmp_path, rows, trainer=GRPOTrainer))
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert torch.equal(ours[name], theirs[name]), name


def test_answers_without_a_score_are_left_out(tmp_path):
    rows = rows_of(mixed_of_three=4, right_of_two=2, one_scored=3, none_scored=3)
    batch = draw(make(tmp_path, rows))
    assert sorted(prompts_of(batch)) == sorted(prompts_with(rows, "mixed of three"))


def test_dropped_prompts_come_again_only_after_all_others(tmp_path):
    rows = rows_of(mixed=1, right=1, wrong=2)
    trainer = make(tmp_path, rows)
    # Rounds are as large as the data, so each has the one mixed prompt, once.
    assert prompts_of(draw(trainer)) == prompts_with(rows, "mixed") * 4
    assert figures(trainer)["extra_rounds"] == [3]

    drawn = []

    def listening(prompts, **kwargs):
        drawn.append(prompts[::G])
        return by_pattern(**kwargs)

    # 4 + 4 + 2 new ones, then dropped ones, but never one that is kept
    rows = rows_of(mixed=2, wrong=8)
    with pytest.raises(RuntimeError, match="2 of the 4 groups"):
        draw(make(tmp_path, rows, listening, max_rounds=5))
    assert len(set(sum(drawn[:2], []))) == 8
    assert set(sum(drawn[:3], [])) == {row["prompt"] for row in rows}
    assert all(len(set(prompts)) == 4 for prompts in drawn)
    assert not set(prompts_with(rows, "mixed")) & set(sum(drawn[3:], []))


def test_rows_with_one_prompt_are_one_prompt(tmp_path):
    rows = rows_of(wrong=4, mixed=4)
    batch = draw(make(tmp_path, rows * 10, shuffle_dataset=False))
    assert sorted(prompts_of(batch)) == sorted(prompts_with(rows, "mixed"))


# Correctness, not the whole reward, decides.


@pytest.mark.parametrize("correctness", [0, 1])
def test_correctness_is_judged_before_the_penalty(tmp_path, correctness):
    rows = rows_of(mixed=4, right=4, wrong=4)
    reward_funcs = [by_pattern, penalty] if correctness == 0 else [penalty, by_pattern]
    batch = draw(make(tmp_path, rows, list(reward_funcs), correctness=correctness))
    assert sorted(prompts_of(batch)) == sorted(prompts_with(rows, "mixed"))
    # The advantages are those of the whole reward: 1, -1/4, -1/2, 0.
    rewards = [1.0, -0.25, -0.5, 0.0]
    mean = sum(rewards) / G
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (G - 1))
    expected = [(r - mean) / (std + 1e-4) for r in rewards]
    assert batch["advantages"].tolist() == pytest.approx(expected * 4, abs=1e-6)


def test_what_the_penalty_hides_from_trl(tmp_path):
    rows = rows_of(right=4)
    trainer = make(tmp_path, rows, [by_pattern, penalty], trainer=GRPOTrainer)
    assert draw(trainer)["advantages"].abs().min() > 0.1
    assert trainer._metrics["train"]["frac_reward_zero_std"] == [0.0]
    with pytest.raises(RuntimeError, match="of 8 groups drawn 8 were all right"):
        draw(make(tmp_path, rows, [by_pattern, penalty], max_rounds=2))


def test_a_mixed_group_whose_rewards_are_equal_is_kept(tmp_path):
    def level(pattern, **kwargs):
        return [-r for r in by_pattern(pattern)]

    batch = draw(make(tmp_path, rows_of(mixed=4), [by_pattern, level]))
    assert batch["advantages"].tolist() == [0.0] * 4 * G


# Data that has too few such groups.


@pytest.mark.parametrize(
    "counts, max_rounds, message",
    [
        (dict(right=4), 3, r"0 of the 4 .* max_rounds=3 rounds: of 12 groups drawn 12 were all "
         r"right, 0 all wrong and 0 had fewer than two scored answers\. Take harder prompts"),
        (dict(wrong=4), 1, "0 of the 4 .* of 4 groups drawn 0 were all right, 4 all wrong and 0 .*"
         "Take easier prompts, a larger num_generations than 4, or a larger max_rounds"),
        (dict(none_scored=2, one_scored=2), 2, "of 8 .* 0 were all right, 0 all wrong and 8 had"),
        # two rounds of four draw all eight
        (dict(mixed=2, right=3, right_of_two=1, wrong=2), 2,
         "2 of the 4 .* of 8 groups drawn 4 were all right, 2 all wrong and 0"),
    ],
)  # fmt: skip
def test_an_unfilled_batch_stops_with_counts(tmp_path, counts, max_rounds, message):
    calls = []

    def counted(pattern, **kwargs):
        calls.append(pattern)
        return by_pattern(pattern)

    with pytest.raises(RuntimeError, match=message):
        train(make(tmp_path, rows_of(**counts), counted, max_rounds=max_rounds))
    assert len(calls) == max_rounds


# Everything that goes with the rows.


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_log_probs_stay_with_their_tokens(tmp_path, loss_type):
    rows = rows_of(mixed=4, right=4, wrong=4)
    trainer = make(
        tmp_path, rows, beta=0.04, per_device_train_batch_size=2 * G, steps_per_generation=2,
        gradient_accumulation_steps=1, loss_type=loss_type,
    )  # fmt: skip
    batch = draw(trainer)
    assert prompts_of(batch)
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    scored = torch.cat([0 * batch["prompt_mask"], batch["completion_mask"]], 1)
    with torch.no_grad():
        logps = token_log_probs(trainer.model, ids, attention, scored)
    logps = logps[:, batch["prompt_ids"].shape[1] :]
    for name in ("old_per_token_logps", "ref_per_token_logps"):
        assert batch[name].shape == batch["completion_mask"].shape
        found = batch[name] * batch["completion_mask"]
        torch.testing.assert_close(found, logps, atol=1e-5, rtol=0)


def test_masks_and_log_probs_of_a_rollout_function(tmp_path):
    tokenizer = load("prime-sums")[1]

    def rollout(prompts, trainer):
        ids = tokenizer(prompts)["input_ids"]
        # as many tokens as the prompt's number has digits, then one that is not the model's
        answers = [i[: len(p) - 10] + [tokenizer.eos_token_id] for i, p in zip(ids, prompts)]  # noqa: B905
        return {
            "prompt_ids": ids,
            "completion_ids": answers,
            "logprobs": [[-float(len(a))] * len(a) for a in answers],
            "env_mask": [[1] * (len(a) - 1) + [0] for a in answers],
        }

    rows = rows_of(mixed=4, right=4, wrong=4)
    batch = draw(make(tmp_path, rows, rollout_func=rollout))
    digits = torch.tensor([len(p) - 10 for p in prompts_of(batch)]).repeat_interleave(G)
    assert batch["completion_mask"].sum(1).tolist() == (digits + 1).tolist()
    own = batch["completion_mask"] * batch["tool_mask"]
    assert own.sum(1).tolist() == digits.tolist()
    assert batch["num_items_in_batch"] == digits.sum()
    logps = batch["sampling_per_token_logps"] * batch["completion_mask"]
    torch.testing.assert_close(logps, -(digits + 1.0)[:, None] * batch["completion_mask"])


def test_truncated_completions_stay_masked(tmp_path):
    rows = rows_of(mixed=4, right=4, wrong=4)
    batch = draw(
        make(tmp_path, rows, mask_truncated_completions=True, max_completion_length=3)
    )  # one or two digits end in time
    assert 0 < batch["completion_mask"].sum(1).count_nonzero() < 4 * G
    assert batch["num_items_in_batch"] == batch["completion_mask"].sum()


def test_chat_prompts(tmp_path):
    tokenizer = load("prime-sums")[1]
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    heard = []

    def judge(prompts, completions, **kwargs):
        heard.extend(message["content"] for [message] in completions)
        return by_pattern(**kwargs)

    rows = rows_of(mixed=4, right=4, wrong=4)
    chats = [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    batch = draw(make(tmp_path, chats, judge, tokenizer=tokenizer))
    assert sorted(prompts_of(batch)) == sorted(prompts_with(rows, "mixed"))
    assert len(heard) > 4 * G and any(text.isdigit() for text in heard)


def test_what_is_not_known_is_not_lost(tmp_path, monkeypatch):
    theirs = GRPOTrainer._generate_and_score_completions

    def with_pixels(self, inputs):
        return theirs(self, inputs) | {"pixel_values": torch.zeros(len(inputs), 3)}

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", with_pixels)
    with pytest.raises(ValueError, match="cannot join pixel_values"):
        draw(make(tmp_path, rows_of(mixed=4)))


# Training.


def test_accumulation_changes_nothing(tmp_path):
    rows = rows_of(mixed=4, right=4, wrong=4)
    losses, norms = [], []
    for parts in (1, 2, 4):
        trainer = make(
            tmp_path, rows, per_device_train_batch_size=4 * G // parts,
            gradient_accumulation_steps=parts,
        )  # fmt: skip
        row = train(trainer).iloc[0]
        losses.append(row["loss"])
        norms.append(row["grad_norm"])
        [batch] = trainer.batches
        assert len(trainer.micro_batches) == parts
        for part in trainer.micro_batches:
            assert len(part["completion_ids"]) == 4 * G // parts
            assert part["num_items_in_batch"] == batch["completion_mask"].sum()
        seen = sorted(i for part in trainer.micro_batches for i in part["completion_ids"].tolist())
        assert seen == sorted(batch["completion_ids"].tolist())
        # On policy every ratio is 1: the loss is −Σ A over the tokens, divided by their number.
        advantages = batch["advantages"][:, None] * batch["completion_mask"]
        expected = -(advantages.sum() / batch["completion_mask"].sum()).item()
        assert abs(expected) > 1e-3
        assert row["loss"] == pytest.approx(expected, abs=1e-6)
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-6)
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-5)


def test_one_generation_serves_several_steps(tmp_path):
    rows = rows_of(mixed=6, right=3, wrong=3)
    trainer = make(
        tmp_path, rows, per_device_train_batch_size=2 * G, steps_per_generation=2,
        num_iterations=2, max_steps=8, learning_rate=1e-4,
    )  # fmt: skip
    history = train(trainer)
    assert [len(batch["completion_ids"]) for batch in trainer.batches] == [4 * G] * 2
    assert len(trainer.micro_batches) == 8
    # logged at the steps that generate, and only there
    logged = history["dynamic_sampling/dropped_share"]
    assert logged.notna().tolist() == [True, False, False, False] * 2
    for batch in trainer.batches:
        assert set(prompts_of(batch)) <= set(prompts_with(rows, "mixed"))
        assert len(set(prompts_of(batch))) == 4


def test_the_same_seed_gives_the_same_run(tmp_path):
    def run(seed):
        trainer = make(tmp_path, PRIMES, exact, seed=seed, max_steps=5, learning_rate=5e-4)
        history = train(trainer)
        batches = [batch["completion_ids"].tolist() for batch in trainer.batches]
        assert history["dynamic_sampling/extra_rounds"].max() > 0
        for batch in trainer.batches:  # right answers and wrong ones in every group
            texts = trainer.processing_class.batch_decode(
                batch["completion_ids"], skip_special_tokens=True
            )
            right = [PRIME_SUMS.answer(p) for p in prompts_of(batch) for _ in range(G)]
            correct = torch.tensor([a == b for a, b in zip(texts, right, strict=True)])
            counts = correct.unflatten(0, (-1, G)).sum(1)
            assert len(counts) == 4 and ((0 < counts) & (counts < G)).all()
        return history, batches

    first, batches = run(1)
    again, same = run(1)
    assert first.equals(again) and batches == same
    assert run(2)[1] != batches


def test_every_batch_and_seed_draws_its_own_prompts(tmp_path):
    drawn = []

    def listening(prompts, **kwargs):
        drawn.append(prompts)
        # an extra round fills the batch
        return by_pattern(["wrong" if len(drawn) % 2 else "mixed"] * len(prompts))

    rows = rows_of(mixed=40)
    for seed in (1, 2):
        train(make(tmp_path, rows, listening, shuffle_dataset=False, max_steps=3, seed=seed))
    first, extra = drawn[::2], drawn[1::2]
    assert first[:3] == first[3:]
    assert len({tuple(sorted(set(prompts))) for prompts in extra}) == 6
    assert all(not set(a) & set(b) for a, b in zip(first, extra, strict=True))


def test_evaluation_is_trls_own(tmp_path):
    rows, eval_rows = rows_of(mixed=4), rows_of(right=4, wrong=2)
    results = []
    for trainer in (Recorder, GRPOTrainer):
        ours = make(
            tmp_path, rows, trainer=trainer, eval_rows=eval_rows, per_device_eval_batch_size=2 * G
        )
        torch.manual_seed(0)
        found = ours.evaluate()
        results.append({n: x for n, x in found.items() if "second" not in n and "time" not in n})
    assert results[0] == results[1]
    assert results[0]["eval_reward"] == pytest.approx(4 / 6)
    assert results[0]["eval_frac_reward_zero_std"] == 1.0
    assert not [name for name in results[0] if "dynamic_sampling" in name]


# Refused at once.


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(correctness=1), ValueError, "correctness is 1: must be the index of one of the 1"),
        (dict(correctness=-1), ValueError, "correctness is -1"),
        (dict(correctness="exact"), TypeError, "correctness must be a whole number, got 'exact'"),
        (dict(max_rounds=0), ValueError, "max_rounds must be at least 1, got 0"),
        (dict(max_rounds=2.5), TypeError, "max_rounds must be a whole number, got 2.5"),
        (dict(max_rounds=True), TypeError, "max_rounds must be a whole number, got True"),
        (dict(scale_rewards="batch"), ValueError, "scale_rewards='batch' normalises over the"),
        (
            dict(multi_objective_aggregation="normalize_then_sum"),
            ValueError,
            "multi_objective_aggregation='normalize_then_sum' normalises",
        ),
        (
            dict(rows=Dataset.from_list(PRIMES).to_iterable_dataset()),
            TypeError,
            "train_dataset must be a datasets.Dataset, .* got IterableDataset",
        ),
    ],
)
def test_refused(tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        make(tmp_path, **(dict(rows=PRIMES, reward_funcs=exact) | options))


# Two processes, and a group that lies across them.


def as_one_of_two(folder: Path) -> None:
    trainer = make(
        folder, rows_of(mixed=3, right=3, wrong=3), [by_pattern, penalty],
        per_device_train_batch_size=6, beta=0.04, steps_per_generation=1,
    )  # fmt: skip
    history = train(trainer)
    [batch], [seen] = trainer.batches, trainer.micro_batches
    assert sorted(seen["prompt_ids"].tolist()) == sorted(batch["prompt_ids"].tolist())
    rank = trainer.accelerator.process_index
    save_file({name: tensor.contiguous() for name, tensor in batch.items()},
              folder / f"{rank}.safetensors")
    logged = history.iloc[0].to_dict() | {"processes": trainer.accelerator.num_processes}
    (folder / f"{rank}.json").write_text(json.dumps(logged), encoding="utf-8")

    data = rows_of(mixed=1, right=3, wrong=2)
    with pytest.raises(RuntimeError, match="1 of the 3 groups .* of 6 groups drawn 3 were all r"):
        train(make(folder, data, per_device_train_batch_size=6, max_rounds=2))


def test_two_processes_fill_one_batch(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*command, __file__, str(tmp_path)], env=os.environ | {"ACCELERATE_USE_CPU": "true"},
        capture_output=True, text=True, timeout=240, encoding="utf-8",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    parts = [load_file(tmp_path / f"{rank}.safetensors") for rank in range(2)]
    logged = [json.loads((tmp_path / f"{r}.json").read_text(encoding="utf-8")) for r in range(2)]
    assert [row["processes"] for row in logged] == [2, 2]
    assert [len(part["prompt_ids"]) for part in parts] == [6, 6]
    assert {part["prompt_ids"].shape for part in parts} == {parts[0]["prompt_ids"].shape}

    whole = {
        name: torch.cat([part[name] for part in parts])
        for name in ("prompt_ids", "completion_mask", "advantages")
    }
    assert sorted(prompts_of(whole)) == sorted(
        prompts_with(rows_of(mixed=3, right=3, wrong=3), "mixed")
    )
    tokens = whole["completion_mask"].sum()
    assert [part["num_items_in_batch"] for part in parts] == [tokens, tokens]
    rewards = torch.tensor([1.0, -0.25, -0.5, 0.0])
    expected = ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).repeat(3)
    torch.testing.assert_close(whole["advantages"], expected)
    loss = -(whole["advantages"][:, None] * whole["completion_mask"]).sum() / tokens
    assert logged[0]["loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert logged[0]["dynamic_sampling/extra_rounds"] in (1, 2)


if __name__ == "__main__":
    as_one_of_two(Path(sys.argv[1]))
    PartialState().wait_for_everyone()
    os._exit(0)  # torch's way out may deadlock: gloo's threads want Python's lock while it waits
