"""DAPO: token mean, higher upper clip, and a penalty for length; equations (5.15) to (5.20)."""

import torch
from jaxtyping import Float, Num, Shaped
from torch import Tensor

from companion.losses.checks import (
    check_advantages,
    check_finite,
    check_not_negative,
    check_positive,
)
from companion.losses.surrogate import clipped_surrogate, token_log_ratios


def dapo_loss(
    logps: Float[Tensor, "batch time"],
    old_logps: Float[Tensor, "batch time"],
    advantages: Float[Tensor, " batch"],
    mask: Shaped[Tensor, "batch time"],
    epsilon_low: float,
    epsilon_high: float,
    num_tokens: int | Num[Tensor, ""] | None = None,
) -> Float[Tensor, ""]:
    """Negative objective of DAPO, (5.16): the mean over all tokens of the batch.

    Args:
        logps, old_logps, mask: as in `grpo_loss`.
        advantages: Â_i, one a response, from `group_advantages`; data.
        epsilon_low, epsilon_high: ε_low and ε_high of the clip to [1 − ε_low, 1 + ε_high].
        num_tokens: the real tokens of the whole batch, when the arguments are one part of it
            (gradient accumulation, several processes): the losses of the parts then *sum* to that
            of the batch. Without it, those of ``mask``.

    Returns:
        The loss, differentiable in ``logps``; 0 where there is no real token.

    Raises:
        TypeError: a tensor argument is no tensor, or a number no number.
        ValueError: shapes or devices that differ, NaN or infinity on a real token (with its
            position), an ε < 0, ``num_tokens`` ≤ 0, a ratio that overflows where the advantage is
            negative.

    Source: book (5.16)–(5.20); Yu et al. 2025 (arXiv:2503.14476), eq. 8; TRL 1.12.0
        ``GRPOTrainer._compute_loss`` with ``loss_type="dapo"``, which takes the mean over all
        prompts of the batch; (5.16) is that of one prompt.
    """
    check_not_negative(epsilon_low=epsilon_low, epsilon_high=epsilon_high)
    log_ratios, real = token_log_ratios(logps, old_logps, mask)
    check_advantages(advantages, logps)
    if num_tokens is None:
        num_tokens = max(1, real.sum().item())
    elif isinstance(num_tokens, Tensor):
        num_tokens = num_tokens.item()
    check_positive(num_tokens=num_tokens)

    objective = clipped_surrogate(log_ratios, advantages[:, None], epsilon_low, epsilon_high)
    return -torch.where(real, objective, 0.0).sum() / num_tokens


def overlong_penalty(
    lengths: Num[Tensor, "*shape"], max_length: int, cache: int
) -> Float[Tensor, "*shape"]:
    """The reward for length, (5.15): 0, falling linearly to −1 over the last tokens allowed.

    Args:
        lengths: |y_i| in tokens.
        max_length: L_max, from which on the penalty is −1.
        cache: L_cache, over how many tokens below it falls: 0 up to L_max − L_cache. With 0 only
            what is longer than L_max is penalised.

    Returns:
        From −1 to 0, in the dtype of ``lengths``, or torch's default one for whole numbers.

    Raises:
        TypeError: ``lengths`` is no tensor, or a number no number.
        ValueError: a length that is negative or not finite (with its position), L_max ≤ 0,
            L_cache outside [0, L_max].

    Source: book (5.15); Yu et al. 2025 (arXiv:2503.14476), eq. 13; TRL 1.12.0
        ``trl.rewards.get_soft_overlong_punishment``.
    """
    if not isinstance(lengths, Tensor):
        raise TypeError(f"lengths must be a torch.Tensor, got {type(lengths).__name__}")
    check_positive(max_length=max_length)
    check_not_negative(cache=cache)
    if cache > max_length:
        raise ValueError(f"cache is {cache}: must be at most max_length = {max_length}")
    if not lengths.is_floating_point():
        lengths = lengths.to(torch.get_default_dtype())
    check_finite(lengths=lengths)
    if (lengths < 0).any():
        index = tuple((lengths < 0).nonzero()[0].tolist())
        where = f"[{', '.join(map(str, index))}]" if index else ""
        raise ValueError(f"lengths{where} is {lengths[index].item()}: must be at least 0")

    free = max_length - cache
    if cache == 0:
        return torch.where(lengths > free, -1.0, 0.0).to(lengths.dtype)
    return ((free - lengths) / cache).clamp(-1, 0)
