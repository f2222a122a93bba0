"""companion.lm.log_probs: which token is scored from where, whatever the padding."""

import math

import pytest
import torch

from companion.lm import build_tokenizer, completion_batch, new_model
from companion.lm.log_probs import sequence_log_probs, token_log_probs

PROMPT, COMPLETION = [5, 6], [7, 8, 1]


@pytest.fixture(scope="module")
def model():
    return new_model(seed=0, dtype=torch.float64)


def batch(left=0, right=0, pad=0, prompt=PROMPT, completion=COMPLETION):
    real = prompt + completion
    return dict(
        input_ids=torch.tensor([[pad] * left + real + [pad] * right]),
        attention_mask=torch.tensor([[0] * left + [1] * len(real) + [0] * right]),
        completion_mask=torch.tensor(
            [[0] * (left + len(prompt)) + [1] * len(completion) + [0] * right]
        ),
    )


def test_every_completion_token_is_scored_from_the_position_before(model):
    ours = token_log_probs(model, **batch())[0]
    logps = model(torch.tensor([PROMPT + COMPLETION])).logits[0].log_softmax(-1)
    expected = [0.0, 0.0] + [logps[1 + t, token].item() for t, token in enumerate(COMPLETION)]
    assert ours.tolist() == pytest.approx(expected, abs=1e-12)
    assert (ours != 0).sum() == 3


@pytest.mark.parametrize("pad", [0, 1], ids=["pad", "pad is eos"])
def test_an_eos_inside_the_prompt_is_a_token_like_any(model, pad):
    prompt = [5, 1, 6]
    ours = token_log_probs(model, **batch(2, 1, pad, prompt))[0, 5:8]
    logps = model(torch.tensor([prompt + COMPLETION])).logits[0].log_softmax(-1)
    expected = torch.stack([logps[2 + t, token] for t, token in enumerate(COMPLETION)])
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("left, right", [(3, 0), (0, 4), (2, 2)])
@pytest.mark.parametrize("pad", [0, 1], ids=["pad", "pad is eos"])
def test_padding_moves_nothing(model, left, right, pad):
    alone = sequence_log_probs(model, **batch())
    padded = sequence_log_probs(model, **batch(left, right, pad))
    torch.testing.assert_close(padded, alone, rtol=0, atol=1e-12)


def test_a_batch_of_unequal_rows_equals_its_rows(model):
    rows = [batch(left=2), batch(right=2), batch(completion=[8, 9, 9, 9, 1])]
    together = {key: torch.cat([row[key] for row in rows]) for key in rows[0]}
    singly = torch.cat([sequence_log_probs(model, **row) for row in rows])
    torch.testing.assert_close(sequence_log_probs(model, **together), singly, rtol=0, atol=1e-12)


def test_the_probabilities_of_all_next_tokens_sum_to_one(model):
    vocabulary = range(model.config.vocab_size)
    rows = [batch(completion=[token]) for token in vocabulary]
    together = {key: torch.cat([row[key] for row in rows]) for key in rows[0]}
    with torch.no_grad():
        total = sequence_log_probs(model, **together).exp().sum()
    assert total.item() == pytest.approx(1.0, abs=1e-12)


def test_temperature_divides_the_logits(model):
    ours = token_log_probs(model, **batch(), temperature=0.6)[0, 2:]
    logits = model(torch.tensor([PROMPT + COMPLETION])).logits[0, 1:-1] / 0.6
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(COMPLETION)[:, None])[:, 0]
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)
    total = sequence_log_probs(model, **batch(), temperature=0.6)
    torch.testing.assert_close(total, expected.sum()[None], rtol=0, atol=1e-12)


def test_a_mask_is_not_0_on_real_tokens(model):
    """Another number than 1 would count a position twice."""
    plain = batch(left=2, right=1)
    doubled = plain | {name: 2 * plain[name] for name in ("attention_mask", "completion_mask")}
    assert torch.equal(token_log_probs(model, **doubled), token_log_probs(model, **plain))


@pytest.mark.bad_input  # a stand-in for the model
def test_nan_under_the_mask_reaches_neither_result_nor_gradient(model):
    class Spoiled(torch.nn.Module):
        """The model, but its logits at the given positions are NaN."""

        def forward(self, **inputs):
            output = model(**inputs)
            spoil = torch.zeros_like(output.logits)
            spoil[:, -2:] = torch.nan  # the two right pads
            output.logits = output.logits + spoil
            return output

    model.zero_grad()
    loss = sequence_log_probs(Spoiled(), **batch(right=2)).sum()
    loss.backward()
    assert torch.isfinite(loss)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert grads and all(torch.isfinite(g).all() for g in grads)
    model.zero_grad()


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "change, message",
    [
        (dict(completion_mask=torch.tensor([[0, 0, 1, 1]])), "completion_mask must have the shape"),
        (dict(completion_mask=torch.tensor([[1, 0, 1, 1, 1]])), r"completion_mask\[0, 0\]"),
        (dict(attention_mask=torch.tensor([[1, 1, 1, 1, 0]])), r"completion_mask\[0, 4\]"),
        (dict(attention_mask=torch.tensor([[1, 0, 1, 1, 1]])), r"completion_mask\[0, 2\]"),
        ({key: row[0] for key, row in batch().items()}, r"input_ids must be .* got shape \(5,\)"),
        ({key: row[:0] for key, row in batch().items()}, r"not empty, got shape \(0, 5\)"),
        (dict(temperature=0.0), "temperature must be finite and above 0"),
        (dict(temperature=math.inf), "temperature must be finite and above 0"),
        (dict(temperature=math.nan), "temperature must be finite and above 0"),
    ],
)
def test_bad_input_is_named(model, change, message):
    with pytest.raises(ValueError, match=message):
        token_log_probs(model, **(batch() | change))


def test_a_batch_of_texts_has_prompt_completion_and_eos_then_pads():
    tokenizer = build_tokenizer()
    ours = completion_batch(tokenizer, ["12>", "1>"], ["3", "456"])
    texts = tokenizer.batch_decode(ours["input_ids"])
    assert texts == ["12>3<eos><pad>", "1>456<eos>"]
    assert ours["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 0], [1] * 6]
    assert ours["completion_mask"].tolist() == [[0, 0, 0, 1, 1, 0], [0, 0, 1, 1, 1, 1]]


def test_without_eos_the_completion_ends_in_its_text():
    tokenizer = build_tokenizer()
    ours = completion_batch(tokenizer, ["1>"], ["23"], eos=False)
    assert tokenizer.batch_decode(ours["input_ids"]) == ["1>23"]


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "prompts, completions, message",
    [
        (["1", "2"], ["3"], "completions has 1 rows, prompts 2"),
        (["1", ""], ["3", "4"], r"prompts\[1\] is empty"),
        (["1", "2"], ["3", ""], r"completions\[1\] is empty"),
        ([], [], "prompts is empty"),
        (["1", "2龍"], ["3", "4"], r"prompts\[1\]: unknown character '龍' in '2龍'"),
        (["1", "2"], ["3", "<eos>虎"], r"completions\[1\]: unknown character '虎'"),
        ("12", ["3", "4"], "prompts: a list of strings is needed"),
        (["1", "2"], "34", "completions: a list of strings is needed"),
    ],
)
def test_bad_texts_are_named(prompts, completions, message):
    with pytest.raises(ValueError, match=message):
        completion_batch(build_tokenizer(), prompts, completions, eos=False)
