"""companion.training.reward_model: a reward model that has learned from pairs."""

import torch

from companion.lm import load, score
from companion.tasks import PRIME_SUMS, preferences
from companion.training import new_reward_model, train_reward_model


def test_the_new_layer_follows_its_seed_and_leaves_the_global_one_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, again, other = (new_reward_model("prime-sums", seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(first.score.weight, again.score.weight)
    assert not torch.equal(first.score.weight, other.score.weight)
    assert first.score.out_features == 1
    body = load("prime-sums")[0].model.state_dict()
    assert all(torch.equal(body[name], p) for name, p in first.model.state_dict().items())


def test_it_learns_to_tell_the_chosen_from_the_rejected():
    pairs = preferences(PRIME_SUMS, 640, seed=0)
    model, history = train_reward_model("prime-sums", pairs, max_steps=40)
    assert history["step"].iloc[-1] == 40
    tokenizer = load("prime-sums")[1]
    untrained = new_reward_model("prime-sums")

    def accuracy(scorer):
        chosen, rejected = (
            score(scorer, tokenizer, pairs["prompt"], pairs[side])
            for side in ("chosen", "rejected")
        )
        return (chosen > rejected).double().mean().item()

    assert accuracy(model) > 0.75 > 0.65 > accuracy(untrained)
