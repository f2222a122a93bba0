"""companion.oracle.grpo: TRL's own advantages, masks and batch for completions that are given."""

import copy
import math

import pytest
import torch

from companion.lm import build_tokenizer, new_model
from companion.oracle import trl_grpo

PROMPTS = [[9, 8]] * 2 + [[7]] * 2


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="module")
def models():
    return tuple(new_model(seed=seed) for seed in range(3))


def ask(models, tokenizer, completions, rewards, **config):
    settings = dict(num_generations=2, loss_type="grpo", beta=0.0) | config
    return trl_grpo(*models, PROMPTS, completions, rewards, tokenizer, **settings)


def test_the_batch_holds_the_given_ids_prompts_left_completions_right(models, tokenizer):
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    result = ask(models, tokenizer, [[5, eos], [6, 6, 6], [5], [eos]], [1.0, 0.0, 2.0, 2.0])
    assert result.batch["input_ids"].tolist() == [
        [9, 8, 5, eos, pad], [9, 8, 6, 6, 6], [pad, 7, 5, pad, pad], [pad, 7, eos, pad, pad],
    ]  # fmt: skip
    assert result.batch["completion_mask"].tolist() == [
        [0, 0, 1, 1, 0], [0, 0, 1, 1, 1], [0, 0, 1, 0, 0], [0, 0, 1, 0, 0],
    ]  # fmt: skip
    assert result.batch["attention_mask"][:, :2].tolist() == [[1, 1]] * 2 + [[0, 1]] * 2
    root = 1 / math.sqrt(2)
    expected = [0.5 / (root + 1e-4), -0.5 / (root + 1e-4), 0, 0]
    assert result.advantages.tolist() == pytest.approx(expected, abs=1e-6)


def test_the_models_are_left_as_they_were(models, tokenizer):
    before = [copy.deepcopy(model.state_dict()) for model in models]
    result = ask(models, tokenizer, [[5], [6], [5], [6]], [1.0, 0.0, 1.0, 0.0], beta=0.1,
                 num_iterations=2)
    assert result.loss.isfinite() and result.metrics["kl"] > 0
    for model, state in zip(models, before, strict=True):
        assert all(p.grad is None for p in model.parameters())
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    "columns, message",
    [
        (([[5]] * 3, [1.0] * 4), "completions must have 4 rows like prompts, got 3"),
        (([[5]] * 4, [1.0] * 3), "rewards must have 4 rows like prompts, got 3"),
        (([[5], [], [5], [5]], [1.0] * 4), r"completions\[1\] is empty"),
    ],
)
def test_bad_batches_are_named(models, tokenizer, columns, message):
    with pytest.raises(ValueError, match=message):
        ask(models, tokenizer, *columns)
