"""Generation: padding moves nothing, seeds hold, bad prompts are named."""

import math

import pytest
import torch

from companion import lm
from companion.tasks import PRIME_SUMS, SORTING


@pytest.fixture(scope="module")
def sorting():
    return lm.load("sorting")


def test_greedy_knows_the_answers(sorting):
    prompts = SORTING.test_prompts[:50]
    responses = lm.generate(*sorting, prompts, max_new_tokens=8)
    right = sum(SORTING.answer(p) == r for p, r in zip(prompts, responses, strict=True))
    assert right >= 45


def test_padding_does_not_move_a_response():
    model, tokenizer = lm.load("prime-sums")
    prompts = [PRIME_SUMS.train_prompts[i] for i in (0, 50, 99)]  # 1, 2 and 3 digits
    together = lm.generate(model, tokenizer, prompts, max_new_tokens=8)
    alone = [lm.generate(model, tokenizer, [p], max_new_tokens=8)[0] for p in prompts]
    assert together == alone == [PRIME_SUMS.answer(p) for p in prompts]


def test_sampling_follows_the_seed(sorting):
    prompts = SORTING.test_prompts[:50]

    def sample(**settings):
        return lm.generate(*sorting, prompts, max_new_tokens=8, **settings)

    assert sample(temperature=1.0, seed=1) == sample(temperature=1.0, seed=1)
    assert sample(temperature=1.0, seed=1) != sample(temperature=1.0, seed=2)
    assert sample(temperature=1e-3) == sample()


def test_sampling_is_from_the_whole_softmax(sorting):
    """The most probable response comes as often as its probability says."""
    model, tokenizer = sorting
    prompt = SORTING.test_prompts[0]
    answer = lm.generate(model, tokenizer, [prompt], max_new_tokens=8)[0]
    ids = torch.tensor([tokenizer.encode(prompt + answer) + [tokenizer.eos_token_id]])
    with torch.no_grad():
        logps = model(ids).logits.log_softmax(-1)[0]
    start = len(prompt)
    expected = sum(logps[t - 1, ids[0, t]] for t in range(start, ids.shape[1])).exp().item()
    samples = lm.generate(model, tokenizer, [prompt] * 2000, max_new_tokens=8, temperature=1.0)
    assert samples.count(answer) / 2000 == pytest.approx(expected, abs=0.05)


def test_sampling_leaves_no_token_out(sorting):
    first = lm.generate(*sorting, ["780667>"] * 1000, max_new_tokens=1, temperature=100.0)
    assert len(set(first)) > 200


@pytest.mark.parametrize("several", [True, False], ids=["several", "one"])
def test_the_first_end_token_of_the_models_config_ends(sorting, several):
    model, tokenizer = sorting
    seven = tokenizer.encode("7")[0]
    usual = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = [usual, seven] if several else seven
    try:
        responses = lm.generate(model, tokenizer, ["780667>", "120000>"], max_new_tokens=8)
    finally:
        model.generation_config.eos_token_id = usual
    assert responses == ["066", "000012"]


def test_without_an_end_token_in_the_models_config_the_tokenizers_ends(sorting, monkeypatch):
    model, tokenizer = sorting
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    assert lm.generate(model, tokenizer, ["780667>"], max_new_tokens=8) == ["066778"]


def test_batches_draw_apart(sorting):
    responses = lm.generate(
        *sorting, ["780667>"] * 8, max_new_tokens=8, temperature=2.0, batch_size=4
    )
    assert responses[:4] != responses[4:]


def test_batches_join_in_order(sorting):
    prompts = SORTING.test_prompts[:7]
    assert lm.generate(*sorting, prompts, max_new_tokens=8, batch_size=3) == lm.generate(
        *sorting, prompts, max_new_tokens=8
    )


def test_a_cut_response_has_the_length_asked(sorting):
    responses = lm.generate(*sorting, SORTING.test_prompts[:5], max_new_tokens=2)
    assert {len(response) for response in responses} == {2}


def test_states_are_left_alone(sorting):
    model, tokenizer = sorting
    model.train()
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    lm.generate(model, tokenizer, ["780667>"], max_new_tokens=2, temperature=1.0)
    assert torch.equal(torch.rand(1), expected)
    assert model.training
    model.eval()


def test_no_prompts(sorting):
    assert lm.generate(*sorting, [], max_new_tokens=8) == []


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ("780667>", {}, "prompts: a list"),
        (["1>", ""], {}, r"prompts\[1\]: is empty"),
        (["1>", "龍>"], {}, r"prompts\[1\]: unknown character '龍'"),
        (["<eos>1龍>"], {}, r"prompts\[0\]: unknown character '龍'"),
        (["1>"], {"max_new_tokens": 0}, "max_new_tokens"),
        (["1>"], {"temperature": 0.0}, "temperature"),
        (["1>"], {"temperature": math.inf}, "temperature"),
        (["1>"], {"temperature": math.nan}, "temperature"),
        (["1>"], {"batch_size": 0}, "batch_size"),
    ],
)
def test_bad_input_is_named(sorting, prompts, settings, message):
    with pytest.raises(ValueError, match=message):
        lm.generate(*sorting, prompts, **({"max_new_tokens": 8} | settings))
