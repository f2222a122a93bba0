"""companion.lm.score: one reward a text, whatever stands beside it."""

import pytest
import torch
from transformers import Qwen2ForSequenceClassification

from companion.lm import build_tokenizer, new_model
from companion.lm.score import score

PROMPTS = ["1+2=", "12+34=", "5="]
COMPLETIONS = ["3", "46", "12345"]


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="module")
def model():
    config = new_model().config
    config.num_labels = 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Qwen2ForSequenceClassification(config).double().eval()


def test_a_score_is_read_at_the_end_token(model, tokenizer):
    ours = score(model, tokenizer, PROMPTS, COMPLETIONS)
    assert ours.shape == (3,) and ours.dtype == torch.float64 and not ours.requires_grad
    for value, prompt, completion in zip(ours, PROMPTS, COMPLETIONS, strict=True):
        ids = tokenizer(prompt + completion + tokenizer.eos_token, return_tensors="pt").input_ids
        assert ids[0, -1] == tokenizer.eos_token_id
        with torch.no_grad():
            assert value.item() == pytest.approx(model(input_ids=ids).logits.item(), abs=1e-12)


def test_without_an_end_token_it_is_read_at_the_last_character(model, tokenizer):
    ours = score(model, tokenizer, ["1+2="], ["3"], eos=False)
    ids = tokenizer("1+2=3", return_tensors="pt").input_ids
    with torch.no_grad():
        assert ours.item() == pytest.approx(model(input_ids=ids).logits.item(), abs=1e-12)
    assert abs(ours - score(model, tokenizer, ["1+2="], ["3"])).item() > 1e-3


def test_neither_the_batch_nor_its_size_moves_a_score(model, tokenizer):
    together = score(model, tokenizer, PROMPTS, COMPLETIONS)
    by_two = score(model, tokenizer, PROMPTS, COMPLETIONS, batch_size=2)
    alone = [score(model, tokenizer, [x], [y])
             for x, y in zip(PROMPTS, COMPLETIONS, strict=True)]
    torch.testing.assert_close(by_two, together, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cat(alone), together, rtol=0, atol=1e-12)


def test_pad_equal_to_eos_keeps_the_end_token(model, tokenizer):
    expected = score(model, tokenizer, PROMPTS, COMPLETIONS)
    same_id = build_tokenizer()
    same_id.pad_token = same_id.eos_token
    ours = score(model, same_id, PROMPTS, COMPLETIONS)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_is_left_as_it_was(model, tokenizer, training):
    model.train(training)
    score(model, tokenizer, PROMPTS, COMPLETIONS)
    assert model.training == training
    model.eval()


@pytest.mark.bad_input
def test_bad_input_is_named(model, tokenizer):
    config = new_model().config
    config.num_labels = 2
    for no_reward in (new_model(), Qwen2ForSequenceClassification(config)):
        with pytest.raises(ValueError, match="num_labels=1"):
            score(no_reward, tokenizer, PROMPTS, COMPLETIONS)
    with pytest.raises(ValueError, match="batch_size"):
        score(model, tokenizer, PROMPTS, COMPLETIONS, batch_size=0)
    with pytest.raises(ValueError, match="prompts is empty"):
        score(model, tokenizer, [], [])
    with pytest.raises(ValueError, match="completions has 1 rows"):
        score(model, tokenizer, PROMPTS, ["1"])
