"""Inputs that broke other implementations of DPO, with their right values."""

import math

import pytest
import torch
from datasets import Dataset
from trl import DPOConfig, DPOTrainer

from companion.lm import build_tokenizer, checkpoint, load, sequence_log_probs
from companion.losses import dpo_loss
from companion.oracle import preference_batch, trl_dpo
from companion.tasks import PRIME_SUMS, preferences
from companion.training import train


def t(*values):
    return torch.tensor(values, dtype=torch.float64)


def trainer(tmp_path, rows, tokenizer=None, **config):
    arguments = dict(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, gradient_checkpointing=False,
        report_to="none", save_strategy="no", disable_tqdm=True, logging_steps=1, max_steps=1,
    )  # fmt: skip
    return DPOTrainer(
        model=str(checkpoint("prime-sums")),
        args=DPOConfig(**(arguments | config)),
        processing_class=tokenizer or load("prime-sums")[1],
        train_dataset=rows if isinstance(rows, Dataset) else Dataset.from_list(rows),
    )


def row(prompt, chosen="77", rejected="78"):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


# The policy equals the reference: the loss is log 2, the gradient is not 0.


def test_at_the_reference_the_loss_is_log_2_and_the_gradient_is_half_beta():
    logps = t(-3.0, -7.0, -1.0).requires_grad_()
    loss = dpo_loss(logps, t(-2.0, -9.0, -4.0), logps.detach(), t(-2.0, -9.0, -4.0), 0.1)
    loss.backward()
    assert loss.item() == pytest.approx(0.693147, abs=1e-6)
    assert logps.grad.tolist() == pytest.approx([-0.1 / 2 / 3] * 3)


@pytest.mark.parametrize("gap, expected", [(2.0, 0.598139), (-2.0, 0.798139), (0.0, 0.693147)])
def test_values_at_beta_a_tenth(gap, expected):
    assert dpo_loss(t(gap), t(0.0), t(0.0), t(0.0), 0.1).item() == pytest.approx(expected, abs=1e-6)


def test_chosen_equal_to_rejected_is_log_2_without_gradient():
    tokenizer = build_tokenizer()
    model, _ = load("prime-sums", dtype=torch.float64)
    ref_model, _ = load("sorting", dtype=torch.float64)
    batch = preference_batch([[5]], [[6, 7]], [[6, 7]], pad_token_id=tokenizer.pad_token_id)
    policy = sequence_log_probs(model, **batch).chunk(2)
    reference = sequence_log_probs(ref_model, **batch).chunk(2)
    loss = dpo_loss(*policy, *reference, 0.1)
    loss.backward()
    theirs = trl_dpo(model, ref_model, batch, tokenizer, beta=0.1)
    for value in (loss.item(), theirs.loss.item()):
        assert value == pytest.approx(math.log(2), abs=1e-12)
    assert max(p.grad.abs().max().item() for p in model.parameters()) < 1e-12


def test_a_tie_counts_as_wrong():
    tokenizer = build_tokenizer()
    model, ref_model = (load("prime-sums", dtype=torch.float64)[0] for _ in range(2))
    batch = preference_batch([[5]], [[6, 7]], [[8]], pad_token_id=tokenizer.pad_token_id)
    theirs = trl_dpo(model, ref_model, batch, tokenizer, beta=0.1)
    assert theirs.metrics["rewards/margins"] == 0  # the policy is the reference
    assert theirs.metrics["rewards/accuracies"] == 0


@pytest.mark.bad_input
def test_minus_infinity_on_a_response_names_its_position():
    with pytest.raises(ValueError, match=r"rejected_logps\[1\] is -inf"):
        dpo_loss(t(-1.0, -1.0), t(-1.0, -torch.inf), t(-1.0, -1.0), t(-1.0, -1.0), 0.1)


# Tokens: pad = eos, lengths, seams. TRL owns these; ours must live with them.


def test_pad_equal_to_eos_keeps_the_eos():
    batch = preference_batch([[9]], [[5, 6, 7, 0]], [[5, 6, 7, 8, 8, 0]], pad_token_id=0)
    assert batch["completion_mask"][0].tolist() == [0, 1, 1, 1, 1, 0, 0]


def test_a_prompt_as_long_as_max_length_drops_its_row(tmp_path):
    rows = [row("1+"), row("1234+"), row("123456789+")]
    kept = trainer(tmp_path, rows, max_length=6)
    assert len(kept.train_dataset) == 2
    scored = kept.data_collator(list(kept.train_dataset))["completion_mask"].sum(-1)
    assert scored[:2].tolist() == [3, 1]  # the second response is cut


def test_an_emptied_dataset_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="num_samples"):  # the sampler's, of 0 rows
        train(trainer(tmp_path, [row("1234+")], max_length=2))


def test_a_chat_template_writes_header_and_bos_once(tmp_path):
    tokenizer = load("prime-sums")[1]
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{{ eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    )
    chat = {
        "prompt": [{"role": "user", "content": "1+2"}],
        "chosen": [{"role": "assistant", "content": "3"}],
        "rejected": [{"role": "assistant", "content": "4"}],
    }
    example = trainer(tmp_path, [chat], tokenizer).train_dataset[0]
    ids = example["prompt_ids"] + example["chosen_ids"]
    text = tokenizer.decode(ids)
    assert text.count("a:") == 1
    assert ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode(example["chosen_ids"]) == "3" + tokenizer.eos_token


def test_trl_appends_one_eos_to_plain_text(tmp_path):
    tokenizer = load("prime-sums")[1]
    rows = [row("1+2", "3", "4" + tokenizer.eos_token)]
    example = trainer(tmp_path, rows, tokenizer).train_dataset[0]
    for key in ("chosen_ids", "rejected_ids"):
        assert example[key].count(tokenizer.eos_token_id) == 1


# The run: the reference at step 0, seeds.


def test_the_first_loss_is_log_2_from_the_folder_and_not_from_a_model_changed_in_memory(tmp_path):
    def first_loss(model):
        pairs = preferences(PRIME_SUMS, 8, seed=0)
        run = trainer(tmp_path, pairs, beta=1.0)
        run.model.load_state_dict(model.state_dict())
        return train(run)["loss"].iloc[0]

    assert first_loss(load("prime-sums")[0]) == pytest.approx(math.log(2), abs=1e-5)
    assert abs(first_loss(load("sorting")[0]) - math.log(2)) > 0.5


def test_the_same_seed_gives_the_same_run_and_another_seed_another(tmp_path):
    def losses(seed):
        pairs = preferences(PRIME_SUMS, 32, seed=0)
        run = trainer(tmp_path, pairs, seed=seed, max_steps=3, learning_rate=1e-3)
        return train(run)["loss"].tolist()

    assert losses(0) == losses(0) != losses(1)
