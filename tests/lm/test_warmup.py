"""The warm-up loop."""

import pytest
import torch
from datasets import Dataset
from torch.optim.optimizer import register_optimizer_step_pre_hook

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


def test_each_step_has_its_rows_its_gradient_and_its_rate():
    norms, rates = [], []

    def note(optimizer, args, kwargs):
        group = optimizer.param_groups[0]
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in group["params"]]).item())
        rates.append(group["lr"])

    tokenizer = lm.build_tokenizer()
    rows = [{"prompt": f"{digit}>", "completion": f"{digit}{digit}"} for digit in range(1, 9)]
    hook = register_optimizer_step_pre_hook(note)
    try:
        losses = warm_up(
            lm.new_model(),
            tokenizer,
            Dataset.from_list(rows),
            batch_size=2,
            learning_rate=1e-9,  # moves nothing
            progress=False,
        )
    finally:
        hook.remove()
    assert len({round(loss, 4) for loss in losses}) == 4
    assert max(norms) < 1.5 * min(norms)  # added up, the last would be about four times the first
    assert rates == pytest.approx([1e-9, 0.854e-9, 0.5e-9, 0.146e-9], rel=0.01)


def test_an_unknown_character_is_refused():
    rows = Dataset.from_list(
        [{"prompt": "1>", "completion": "1"}, {"prompt": "2>", "completion": "龍"}]
    )
    with pytest.raises(ValueError, match=r"completions\[1\]: unknown character '龍'"):
        warm_up(lm.new_model(), lm.build_tokenizer(), rows, batch_size=1, progress=False)


def test_too_few_demonstrations():
    rows = Dataset.from_list([{"prompt": "1>", "completion": "1"}])
    with pytest.raises(ValueError, match="demonstrations: 1 rows do not fill one batch of 64"):
        warm_up(lm.new_model(), lm.build_tokenizer(), rows)
