"""companion.training.tabular: PPO finds the maximizer of (4.9) on the exact world."""

import pytest
import torch

from companion.exact import World, kl, tilt
from companion.training import tabular_ppo


def world_of(length, seeds=8):
    world, g = World(prompts=2, letters=3, max_length=length), torch.Generator().manual_seed(0)
    return world, world.random_logits(g, seeds), world.random_rewards(g, seeds)


def run(*arguments, seed=1, **settings):
    return tabular_ppo(*arguments, generator=torch.Generator().manual_seed(seed), **settings)


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("beta", [0.5, 1.0])
def test_every_seed_comes_to_the_maximizer(length, beta):
    world, ref_logits, rewards = world_of(length)
    trace = run(world, ref_logits, rewards, beta)
    star = tilt(world.log_probs(ref_logits), rewards / beta)
    distance = kl(trace, star).mean(-1)
    assert torch.equal(trace[0], world.log_probs(ref_logits))
    assert torch.allclose(trace.exp().sum(-1), torch.ones(()).double())
    assert distance[-1].max() < 0.01 < 0.1 < distance[0].min()


def test_without_a_reward_the_reference_stays():
    world, ref_logits, rewards = world_of(2)
    trace = run(world, ref_logits, torch.zeros_like(rewards), 1.0)
    assert kl(trace[-1], trace[0]).max() < 0.01


def test_the_same_generator_gives_the_same_run():
    arguments = *world_of(1), 0.5
    first, again, other = (run(*arguments, seed=seed, updates=3) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert first.shape == (4, 8, 2, 4)
