"""Inputs that broke other implementations of reward models, with their right values."""

import copy

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification
from trl import RewardConfig, RewardTrainer

from companion.lm import checkpoint, load, score
from companion.losses import reward_model_loss
from companion.oracle import preference_batch, trl_reward_model
from companion.training import train

PROMPT, COMPLETION = "20未満の素数の合計は？", "77"


@pytest.fixture(scope="module")
def tokenizer():
    return load("prime-sums")[1]


@pytest.fixture(scope="module")
def model():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForSequenceClassification.from_pretrained(
            str(checkpoint("prime-sums")), num_labels=1, dtype=torch.float64
        ).eval()


@pytest.fixture(scope="module")
def ids(tokenizer):
    return tokenizer([PROMPT + COMPLETION + tokenizer.eos_token], return_tensors="pt").input_ids


def trainer(tmp_path, rows, tokenizer, model=None, **config):
    arguments = dict(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, gradient_checkpointing=False,
        report_to="none", save_strategy="no", disable_tqdm=True, logging_steps=1, max_steps=1,
    )  # fmt: skip
    return RewardTrainer(
        model=model or str(checkpoint("prime-sums")),
        args=RewardConfig(**(arguments | config)),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows),
    )


def row(prompt, chosen="77", rejected="78"):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_margins_from_a_tie_to_far_off_have_finite_losses_and_gradients(dtype):
    margins = torch.tensor([0.0, 1.0, -1.0, -200.0], dtype=dtype, requires_grad=True)
    losses = [reward_model_loss(m, torch.zeros(1, dtype=dtype)) for m in margins.split(1)]
    expected = [0.693147, 0.313262, 1.313262, 200.0]
    assert [loss.item() for loss in losses] == pytest.approx(expected, abs=1e-6)
    (gradient,) = torch.autograd.grad(sum(losses), margins)
    expected = torch.tensor([-0.5, -0.268941, -0.731059, -1.0], dtype=dtype)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-6)


def test_a_tie_counts_as_wrong(model, tokenizer):
    silent = copy.deepcopy(model)
    torch.nn.init.zeros_(silent.score.weight)
    batch = preference_batch([[5]], [[6, 7]], [[8]], pad_token_id=tokenizer.pad_token_id)
    theirs = trl_reward_model(silent, batch, tokenizer)
    assert theirs.metrics["margin"] == 0 and theirs.metrics["accuracy"] == 0
    assert theirs.loss.item() == pytest.approx(0.693147, abs=1e-6)


def test_a_reward_model_has_one_output_a_row_and_a_language_model_is_refused(
    tmp_path, model, tokenizer, ids
):
    assert model(input_ids=ids.expand(3, -1)).logits.shape == (3, 1)
    assert trainer(tmp_path, [row("1+")], tokenizer).model.config.num_labels == 1
    language_model = load("prime-sums")[0]
    with pytest.raises(ValueError, match="num_labels=2"):
        trainer(tmp_path, [row("1+")], tokenizer, language_model)
    with pytest.raises(ValueError, match="num_labels=1"):
        score(language_model, tokenizer, [PROMPT], [COMPLETION])


# The score of a text, alone and padded.


def padded(ids, pad, left, right):
    def fill(value, n):
        return torch.full((1, n), value)

    return dict(
        input_ids=torch.cat([fill(pad, left), ids, fill(pad, right)], 1),
        attention_mask=torch.cat([fill(0, left), torch.ones_like(ids), fill(0, right)], 1),
    )


@pytest.mark.parametrize("left, right", [(0, 4), (3, 0), (2, 2)])
def test_a_score_is_the_same_alone_and_padded(model, tokenizer, ids, left, right):
    alone = model(input_ids=ids).logits
    beside = model(**padded(ids, tokenizer.pad_token_id, left, right)).logits
    # on the left the positions start later: rotary angles are rounded in float32
    torch.testing.assert_close(beside, alone, rtol=0, atol=1e-12 if left == 0 else 1e-5)


def test_pad_equal_to_eos_reads_the_score_one_token_early_and_ours_does_not(
    model, tokenizer, ids
):
    same_id = load("prime-sums")[1]
    same_id.pad_token = same_id.eos_token
    confused = copy.deepcopy(model)
    confused.config.pad_token_id = same_id.eos_token_id
    early = confused(**padded(ids, same_id.eos_token_id, 0, 2)).logits
    torch.testing.assert_close(early, model(input_ids=ids[:, :-1]).logits)
    right = model(input_ids=ids).logits
    assert abs(early - right) > 1e-3
    ours = score(confused, same_id, [PROMPT, PROMPT], [COMPLETION, "1" + COMPLETION])
    torch.testing.assert_close(ours[:1], right[0].detach(), rtol=0, atol=1e-12)


# The data: what TRL keeps and adds.


def test_max_length_drops_whole_pairs_and_the_end_token_counts(tmp_path, tokenizer):
    rows = [row("1+"), row("1234+"), row("123456789+"), row("1234+", "77", "7788")]
    kept = trainer(tmp_path, rows, tokenizer, max_length=8).train_dataset
    assert len(kept) == 2  # of 4: both responses must fit
    assert [len(ids) for ids in kept["chosen_ids"]] == [5, 8]
    assert all(ids[-1] == tokenizer.eos_token_id for ids in kept["rejected_ids"])


def test_an_emptied_dataset_is_an_error(tmp_path, tokenizer):
    with pytest.raises(ValueError, match="num_samples"):  # the sampler's, of 0 rows
        train(trainer(tmp_path, [row("1234+")], tokenizer, max_length=4))


def test_one_eos_is_appended_and_none_doubled(tmp_path, tokenizer):
    rows = [row("1+2", "3", "4" + tokenizer.eos_token)]
    example = trainer(tmp_path, rows, tokenizer).train_dataset[0]
    for key in ("chosen_ids", "rejected_ids"):
        assert example[key].count(tokenizer.eos_token_id) == 1


def test_centring_adds_the_squared_sum(model, tokenizer):
    batch = preference_batch(
        [[5], [6]], [[6, 7, 1], [9, 1]], [[8, 1], [7, 7, 1]], pad_token_id=tokenizer.pad_token_id
    )
    scores = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    chosen, rejected = scores.squeeze(-1).chunk(2)
    expected = reward_model_loss(chosen, rejected) + 0.3 * ((chosen + rejected) ** 2).mean()
    theirs = trl_reward_model(model, batch, tokenizer, center_rewards_coefficient=0.3)
    torch.testing.assert_close(theirs.loss, expected.detach(), rtol=0, atol=1e-12)
