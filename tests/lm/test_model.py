"""New models: sizes, seeds, and the caller's random state."""

import pytest
import torch

from companion.lm import new_model


def test_the_tiny_one_is_tiny():
    model = new_model("tiny")
    assert model.num_parameters() == 159_040
    assert model.dtype == torch.float32


def test_seed():
    one, same, other = new_model(seed=1), new_model(seed=1), new_model(seed=2)
    weights = [m.get_input_embeddings().weight for m in (one, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_random_state_is_left_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    new_model()
    assert torch.equal(torch.rand(1), expected)


def test_float64():
    model = new_model(dtype=torch.float64)
    assert model(torch.tensor([[4, 5]])).logits.dtype == torch.float64


def test_unknown_size():
    with pytest.raises(ValueError, match="size: unknown size 'huge'; known: tiny, small"):
        new_model("huge")
