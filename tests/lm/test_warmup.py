"""The warm-up loop."""

import pytest
import torch
from datasets import Dataset

from companion import lm
from companion.lm.warmup import IGNORED, _tensors, warm_up


def test_it_learns_what_it_is_shown_and_only_that():
    model, tokenizer = lm.new_model(), lm.build_tokenizer()
    rows = [{"prompt": "5>", "completion": "5"}, {"prompt": "77>", "completion": "東京です。"}]
    losses = warm_up(model, tokenizer, Dataset.from_list(rows * 80), batch_size=4, progress=False)
    assert len(losses) == 40
    assert losses[0] > 4 and losses[-1] < 0.05
    assert lm.generate(model, tokenizer, ["5>", "77>"], max_new_tokens=8) == ["5", "東京です。"]
    assert not model.training


def test_labels_are_the_completion_and_its_end():
    tokenizer = lm.build_tokenizer()
    rows = Dataset.from_list(
        [{"prompt": "12>", "completion": "1"}, {"prompt": "1>", "completion": "345"}]
    )
    input_ids, labels = _tensors(tokenizer, rows)
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id

    def ids(text):
        return tokenizer.encode(text)

    assert input_ids.tolist() == [ids("12>1") + [eos, pad], ids("1>345") + [eos]]
    assert labels.tolist() == [
        [IGNORED] * 3 + ids("1") + [eos, IGNORED],
        [IGNORED] * 2 + ids("345") + [eos],
    ]
    assert torch.equal(labels == IGNORED, labels < 0)


def test_too_few_demonstrations():
    rows = Dataset.from_list([{"prompt": "1>", "completion": "1"}])
    with pytest.raises(ValueError, match="demonstrations: 1 rows do not fill one batch of 64"):
        warm_up(lm.new_model(), lm.build_tokenizer(), rows)
