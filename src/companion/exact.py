"""An exactly enumerable world in which derivations can be executed.

A few prompts, a few letters, and *all* responses up to a length: every expectation is a finite
sum, so both sides of an equation can be computed in float64 and compared.

A response is a string of letters that ends in EOS, or is cut at the length limit; cut responses
are responses too, so a policy's probabilities sum to 1. A policy is a table of logits, one row of
letters and EOS per prompt and prefix. Leading dimensions are a batch of policies (seeds, values of
β, ...): everything here broadcasts over them and is differentiable.

    world = World(prompts=2, letters=2, max_length=3)
    logits = world.random_logits(generator)          # (prompt, prefix, token)
    logps = world.log_probs(logits)                  # (prompt, response)
    expect(logps.exp(), rewards)                     # E_{y~π(.|x)}[r(x, y)], (prompt,)
"""

from dataclasses import dataclass, field
from itertools import product
from string import ascii_lowercase

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class World:
    """All prompts and responses of an enumerable language.

    Args:
        prompts: number of prompts X.
        letters: number of letters, 1 to 26; the vocabulary V is the letters and EOS.
        max_length: T, at most this many tokens in a response, EOS counted.

    Attributes:
        responses: Y strings, in order of length; "ab$" ends in EOS ("$"), "abc" is cut.
        tokens: (Y, T) token ids, letters first, EOS = ``letters``; 0 under the mask.
        mask: (Y, T) True on a response's tokens.
        prefixes: (Y, T) the index of the prefix each token follows, out of ``num_prefixes``.

    Raises:
        ValueError: a size below 1, or more than 26 letters.
    """

    prompts: int
    letters: int
    max_length: int
    responses: tuple[str, ...] = field(init=False, repr=False)
    tokens: Int[Tensor, "response time"] = field(init=False, repr=False, compare=False)
    mask: Bool[Tensor, "response time"] = field(init=False, repr=False, compare=False)
    prefixes: Int[Tensor, "response time"] = field(init=False, repr=False, compare=False)
    num_prefixes: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("prompts", "letters", "max_length"):
            size = getattr(self, name)
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {size}")
        if self.letters > len(ascii_lowercase):
            raise ValueError(f"letters must be at most 26, got {self.letters}")
        alphabet = ascii_lowercase[: self.letters]
        prefixes = [
            "".join(word)
            for length in range(self.max_length)
            for word in product(alphabet, repeat=length)
        ]
        responses = [prefix + "$" for prefix in prefixes]
        responses += ["".join(word) for word in product(alphabet, repeat=self.max_length)]

        index = {prefix: i for i, prefix in enumerate(prefixes)}
        vocabulary = {letter: i for i, letter in enumerate(alphabet + "$")}
        shape = len(responses), self.max_length
        tokens, where = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
        mask = torch.zeros(shape, dtype=torch.bool)
        for i, response in enumerate(responses):
            for t, letter in enumerate(response):
                tokens[i, t], where[i, t] = vocabulary[letter], index[response[:t]]
                mask[i, t] = True

        for name, value in dict(
            responses=tuple(responses),
            tokens=tokens,
            mask=mask,
            prefixes=where,
            num_prefixes=len(prefixes),
        ).items():
            object.__setattr__(self, name, value)  # the dataclass is frozen

    def random_logits(
        self, generator: torch.Generator, *batch: int, scale: float = 1.0
    ) -> Float[Tensor, "*batch prompt prefix token"]:
        """Logits of random policies, normal with standard deviation ``scale``, float64."""
        shape = *batch, self.prompts, self.num_prefixes, self.letters + 1
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

    def random_rewards(
        self, generator: torch.Generator, *batch: int, scale: float = 1.0
    ) -> Float[Tensor, "*batch prompt response"]:
        """Random rewards r(x, y), normal with standard deviation ``scale``, float64."""
        shape = *batch, self.prompts, len(self.responses)
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

    def token_log_probs(
        self, logits: Float[Tensor, "*batch prompt prefix token"]
    ) -> Float[Tensor, "*batch prompt response time"]:
        """log π(y_t | x, y_<t), 0 under the mask."""
        logps = logits.log_softmax(-1)[..., self.prefixes, self.tokens]
        return torch.where(self.mask, logps, 0.0)

    def log_probs(
        self, logits: Float[Tensor, "*batch prompt prefix token"]
    ) -> Float[Tensor, "*batch prompt response"]:
        """log π(y | x) of every response, in nats; the probabilities sum to 1."""
        return self.token_log_probs(logits).sum(-1)

    def logits_of(
        self, log_probs: Float[Tensor, "*batch prompt response"]
    ) -> Float[Tensor, "*batch prompt prefix token"]:
        """The autoregressive policy of a distribution over responses (inverse of `log_probs`).

        The logit of a token after a prefix is the log of the total probability of the responses
        that begin so. A prefix of probability 0 has no next token: its row is NaN.
        """
        vocabulary = self.letters + 1
        cells = (self.prefixes * vocabulary + self.tokens)[self.mask]
        rows = torch.arange(len(self.responses))[:, None].expand_as(self.mask)[self.mask]
        begins = torch.zeros(self.num_prefixes * vocabulary, len(self.responses), dtype=torch.bool)
        begins[cells, rows] = True
        masses = log_probs[..., None, :].masked_fill(~begins, -torch.inf).logsumexp(-1)
        return masses.unflatten(-1, (self.num_prefixes, vocabulary)).log_softmax(-1)


def expect(
    probs: Float[Tensor, "*batch prompt response"], values: Float[Tensor, "*values"]
) -> Float[Tensor, "*batch prompt"]:
    """E_{y~π(.|x)}[f(x, y)] per prompt; ``values`` broadcasts against ``probs``.

    A response of probability 0 counts as 0 whatever its value, −∞ included.
    """
    # Masked before the product: after it, 0 times an infinity would be a NaN gradient.
    return (probs * torch.where(probs > 0, values, 0.0)).sum(-1)


def kl(
    log_p: Float[Tensor, "*batch prompt response"], log_q: Float[Tensor, "*batch_q prompt response"]
) -> Float[Tensor, "*batch prompt"]:
    """D_KL[p(.|x) ‖ q(.|x)] per prompt, in nats."""
    return expect(log_p.exp(), log_p - log_q)


def tilt(
    log_p: Float[Tensor, "*batch prompt response"], exponent: Float[Tensor, "*values"]
) -> Float[Tensor, "*batch prompt response"]:
    """log of the distribution ∝ p(y|x) · exp(exponent(x, y)).

    ``tilt(ref_logps, rewards / beta)`` is log π*, the maximizer of (4.9).
    """
    return (log_p + exponent).log_softmax(-1)


def log_partition(
    log_p: Float[Tensor, "*batch prompt response"], exponent: Float[Tensor, "*values"]
) -> Float[Tensor, "*batch prompt"]:
    """log Z(x) = log Σ_y p(y|x) · exp(exponent(x, y)), the normalizer of `tilt`."""
    return (log_p + exponent).logsumexp(-1)


def bradley_terry(
    rewards: Float[Tensor, "*batch prompt response"],
) -> Float[Tensor, "*batch prompt response response"]:
    """P(y ≻ y' | x) = σ(r(x, y) − r(x, y')), indexed [..., y, y']."""
    return torch.sigmoid(rewards[..., :, None] - rewards[..., None, :])


def sample(
    probs: Float[Tensor, "*batch prompt response"], n: int, generator: torch.Generator
) -> Int[Tensor, "*batch prompt n"]:
    """n independent responses per prompt, as indices into ``World.responses``."""
    drawn = torch.multinomial(probs.flatten(0, -2), n, replacement=True, generator=generator)
    return drawn.unflatten(0, probs.shape[:-1])


def sample_preferences(
    probs: Float[Tensor, "*batch prompt response"],
    rewards: Float[Tensor, "*values"],
    n: int,
    generator: torch.Generator,
) -> tuple[Int[Tensor, "*batch prompt n"], Int[Tensor, "*batch prompt n"]]:
    """n preference pairs (chosen, rejected) per prompt, as response indices.

    Both responses are drawn from ``probs``; which one is preferred is drawn under Bradley–Terry.
    ``rewards`` broadcasts to ``probs``: one world's rewards serve a batch of policies.
    """
    rewards = rewards.expand_as(probs)
    first, second = sample(probs, n, generator), sample(probs, n, generator)
    margins = rewards.gather(-1, first) - rewards.gather(-1, second)
    coins = torch.rand(margins.shape, generator=generator, dtype=margins.dtype)
    wins = coins < torch.sigmoid(margins)
    return torch.where(wins, first, second), torch.where(wins, second, first)
