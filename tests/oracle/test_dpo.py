"""companion.oracle.dpo: TRL's collator and trainer, unchanged."""

import pytest
import torch

from companion.lm import build_tokenizer, new_model
from companion.oracle import preference_batch, trl_dpo


def test_the_batch_is_trls_chosen_rows_first_and_masks_are_positions():
    batch = preference_batch([[5, 6], [7]], [[8, 0], [9]], [[9], [8, 8, 0]], pad_token_id=0)
    assert batch["input_ids"].tolist() == [[5, 6, 8, 0], [7, 9, 0, 0], [5, 6, 9, 0], [7, 8, 8, 0]]
    assert batch["completion_mask"].tolist() == [
        [0, 0, 1, 1], [0, 1, 0, 0], [0, 0, 1, 0], [0, 1, 1, 1]
    ]  # fmt: skip
    # pad and eos share the id 0 here: the last EOS stays real
    assert batch["attention_mask"].tolist() == [
        [1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]
    ]  # fmt: skip


@pytest.mark.parametrize(
    "columns, message",
    [
        (([[1]], [[2], [3]], [[2]]), "chosen must have 1 rows like prompts, got 2"),
        (([[1], [1]], [[2], [2]], [[2], []]), r"rejected\[1\] is empty"),
        (([[]], [[2]], [[2]]), r"prompts\[0\] is empty"),
    ],
)
def test_bad_batches_are_named(columns, message):
    with pytest.raises(ValueError, match=message):
        preference_batch(*columns, pad_token_id=0)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "columns, message",
    [
        (([], [], []), "prompts is empty"),
        ((["ab"], [[2]], [[2]]), r"prompts\[0\] must be token ids, not 'ab'"),
        (([[1]], "a", [[2]]), r"chosen\[0\] must be token ids, not 'a'"),
        (([1, 2], [3, 4], [5, 6]), r"prompts\[0\] must be token ids, not 1"),
        (([[1], [1]], [[2], [2]], [[2], [0.5]]), r"rejected\[1\] must be token ids, not \[0.5\]"),
        (([[1]], [[[2]]], [[2]]), r"chosen\[0\] must be token ids"),
    ],
)
def test_batches_that_are_no_token_ids_are_named(columns, message):
    with pytest.raises(ValueError, match=message):
        preference_batch(*columns, pad_token_id=0)


def test_the_callers_models_are_left_alone():
    tokenizer = build_tokenizer()
    model, ref_model = new_model(seed=0), new_model(seed=1)
    forward = model.forward
    before = {name: p.clone() for name, p in model.named_parameters()}
    batch = preference_batch([[5]], [[6, 7]], [[8]], pad_token_id=tokenizer.pad_token_id)
    first = trl_dpo(model, ref_model, batch, tokenizer, beta=0.1)
    again = trl_dpo(model, ref_model, batch, tokenizer, beta=0.1)
    assert model.forward == forward
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert torch.equal(first.loss, again.loss)
    assert all(torch.equal(g, again.gradients[name]) for name, g in first.gradients.items())
    assert {"rewards/margins", "rewards/accuracies", "logps/chosen"} <= set(first.metrics)


def test_an_unknown_loss_type_is_trls_error():
    tokenizer = build_tokenizer()
    batch = preference_batch([[5]], [[6]], [[8]], pad_token_id=tokenizer.pad_token_id)
    with pytest.raises(ValueError, match="Unknown loss type: nonsense"):
        trl_dpo(new_model(), new_model(seed=1), batch, tokenizer, loss_type="nonsense")
