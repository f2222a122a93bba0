"""companion.exact: the enumerable world."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from companion.exact import (
    World,
    bradley_terry,
    expect,
    kl,
    log_partition,
    sample,
    sample_preferences,
    tilt,
)

WORLDS = st.builds(
    World, prompts=st.integers(1, 3), letters=st.integers(1, 3), max_length=st.integers(1, 3)
)
SEEDS = st.integers(0, 2**32 - 1)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_responses_are_all_that_end_in_eos_or_are_cut():
    assert World(1, 2, 2).responses == ("$", "a$", "b$", "aa", "ab", "ba", "bb")


@pytest.mark.parametrize("letters, max_length", list(itertools.product((1, 2, 3), (1, 2, 3))))
def test_the_number_of_responses(letters, max_length):
    ended = sum(letters**k for k in range(max_length))
    assert len(World(1, letters, max_length).responses) == ended + letters**max_length


@given(WORLDS, SEEDS)
@settings(max_examples=25)
def test_probabilities_sum_to_one_over_any_batch(world, seed):
    logps = world.log_probs(world.random_logits(generator(seed), 2, 3, scale=3.0))
    assert logps.shape == (2, 3, world.prompts, len(world.responses))
    torch.testing.assert_close(logps.exp().sum(-1), torch.ones(2, 3, world.prompts).double())


def test_log_probs_by_hand():
    world = World(prompts=1, letters=2, max_length=2)
    logits = world.random_logits(generator(0))
    step = logits.log_softmax(-1)[0].tolist()  # rows: "", "a", "b"; columns: a, b, EOS
    by_hand = {
        "$": step[0][2], "a$": step[0][0] + step[1][2], "b$": step[0][1] + step[2][2],
        "aa": step[0][0] + step[1][0], "ab": step[0][0] + step[1][1],
        "ba": step[0][1] + step[2][0], "bb": step[0][1] + step[2][1],
    }  # fmt: skip
    ours = dict(zip(world.responses, world.log_probs(logits)[0].tolist(), strict=True))
    assert ours == pytest.approx(by_hand, abs=1e-14)


@given(WORLDS, SEEDS)
@settings(max_examples=25)
def test_logits_of_is_the_inverse_of_log_probs(world, seed):
    g = generator(seed)
    target = world.random_rewards(g, 2).log_softmax(-1)  # any distribution over responses
    torch.testing.assert_close(world.log_probs(world.logits_of(target)), target)


@given(WORLDS, SEEDS)
@settings(max_examples=25)
def test_log_probs_are_differentiable(world, seed):
    logits = world.random_logits(generator(seed)).requires_grad_()
    assert torch.autograd.gradcheck(world.log_probs, logits)
    # d/dθ Σ_y π(y|x) = 0
    (gradient,) = torch.autograd.grad(world.log_probs(logits).exp().sum(), logits)
    assert gradient.abs().max() < 1e-12


def test_expect_is_the_sum_and_ignores_impossible_responses():
    probs = torch.tensor([[0.25, 0.75, 0.0]], dtype=torch.float64)
    values = torch.tensor([4.0, 8.0, -torch.inf], dtype=torch.float64)
    assert expect(probs, values).tolist() == [7.0]


def test_expect_and_kl_have_finite_gradients_at_probability_zero():
    probs = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64, requires_grad=True)
    expect(probs, torch.tensor([1.0, 2.0, -torch.inf])).sum().backward()
    assert probs.grad.tolist() == [[1.0, 2.0, 0.0]]
    logits = torch.tensor([[0.0, 1.0, -torch.inf]], dtype=torch.float64, requires_grad=True)
    kl(logits.log_softmax(-1), torch.zeros(1, 3).double().log_softmax(-1)).sum().backward()
    assert torch.isfinite(logits.grad[0, :2]).all()


@given(SEEDS)
@settings(max_examples=25)
def test_kl_is_zero_at_equality_positive_elsewhere_and_has_the_textbook_value(seed):
    world = World(2, 2, 2)
    log_p, log_q = world.log_probs(world.random_logits(generator(seed), 2))
    assert kl(log_p, log_p).abs().max() == 0
    assert (kl(log_p, log_q) > 0).all()
    by_hand = sum(
        p * math.log(p / q) for p, q in zip(
            log_p[0].exp().tolist(), log_q[0].exp().tolist(), strict=True
        )
    )
    assert kl(log_p, log_q)[0].item() == pytest.approx(by_hand, abs=1e-12)


@given(SEEDS, st.floats(0.1, 5.0))
@settings(max_examples=25)
def test_tilt_maximizes_reward_minus_beta_kl(seed, beta):
    g = generator(seed)
    world = World(2, 2, 2)
    ref = world.log_probs(world.random_logits(g))
    rewards = world.random_rewards(g)
    others = world.log_probs(world.random_logits(g, 50))

    def objective(logps):
        return expect(logps.exp(), rewards) - beta * kl(logps, ref)

    best = objective(tilt(ref, rewards / beta))
    torch.testing.assert_close(best, beta * log_partition(ref, rewards / beta))
    assert (objective(others) <= best).all()


def test_bradley_terry():
    rewards = torch.tensor([[0.0, math.log(3.0)]], dtype=torch.float64)
    expected = torch.tensor([[[0.5, 0.25], [0.75, 0.5]]], dtype=torch.float64)
    torch.testing.assert_close(bradley_terry(rewards), expected)


def test_samples_follow_the_probabilities_per_policy_and_prompt():
    world, n = World(2, 2, 2), 20_000
    probs = world.log_probs(world.random_logits(generator(0), 3, scale=2.0)).exp()
    drawn = sample(probs, n, generator(1))
    shares = torch.nn.functional.one_hot(drawn, len(world.responses)).double().mean(-2)
    error = (shares - probs).abs() / (probs * (1 - probs) / n).sqrt()
    assert error.max() < 5  # standard errors


def test_sampled_preferences_follow_bradley_terry():
    probs = torch.tensor([[0.5, 0.5]], dtype=torch.float64)
    rewards = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    chosen, rejected = sample_preferences(probs, rewards, 20_000, generator(0))
    different = chosen != rejected
    assert different.double().mean().item() == pytest.approx(0.5, abs=0.02)
    wins = (chosen[different] == 0).double().mean().item()
    assert wins == pytest.approx(torch.sigmoid(torch.tensor(1.0)).item(), abs=0.02)


def test_scale_is_the_standard_deviation():
    world = World(4, 3, 3)
    for draw in (world.random_logits, world.random_rewards):
        torch.testing.assert_close(draw(generator(0), scale=3.0), 3 * draw(generator(0)))
    assert world.random_rewards(generator(0)).std().item() == pytest.approx(1.0, abs=0.1)


def test_both_responses_of_a_pair_are_drawn_and_every_policy_has_its_own():
    probs = torch.full((2, 1, 2), 0.5, dtype=torch.float64)
    chosen, rejected = sample_preferences(probs, torch.zeros(2).double(), 1000, generator(0))
    for ours, theirs in ((chosen, rejected), (chosen, rejected.flip(-1))):
        assert (ours == theirs).double().mean().item() == pytest.approx(0.5, abs=0.05)
    assert not torch.equal(chosen[0], chosen[1]) and not torch.equal(rejected[0], rejected[1])




def test_every_policy_has_its_own_coins():
    probs = torch.full((2, 1, 2), 0.5, dtype=torch.float64)
    g = generator(0)
    first, second = sample(probs, 1000, g), sample(probs, 1000, g)
    chosen, _ = sample_preferences(probs, torch.zeros(2).double(), 1000, generator(0))
    tossed = (first != second).all(0)  # where both policies had two responses to choose from
    first_wins = (chosen == first)[:, tossed]
    assert (first_wins[0] == first_wins[1]).double().mean().item() == pytest.approx(0.5, abs=0.1)


def test_the_same_seed_draws_the_same():
    probs = World(1, 2, 2).log_probs(World(1, 2, 2).random_logits(generator(0))).exp()
    first, again, other = (sample(probs, 50, generator(s)) for s in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize(
    "sizes, named",
    [
        ((0, 2, 2), "prompts"), ((1, 0, 2), "letters"), ((1, 2, 0), "max_length"),
        ((1, 27, 1), "26"), ((1.5, 2, 2), "prompts"),
    ],
)  # fmt: skip
@pytest.mark.bad_input
def test_bad_sizes_are_named(sizes, named):
    with pytest.raises(ValueError, match=named):
        World(*sizes)
