"""The clipped importance ratio, common to (2.29), (5.4), (5.11), (5.16) and (5.24)."""

import math

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from companion.losses.checks import check_mask, check_tokens


def token_log_ratios(
    logps: Float[Tensor, "batch time"],
    old_logps: Float[Tensor, "batch time"],
    mask: Shaped[Tensor, "batch time"],
) -> tuple[Float[Tensor, "batch time"], Bool[Tensor, "batch time"]]:
    """log w = log π_θ − log π_old on real tokens and 0 elsewhere, and where the real tokens are.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: shapes, dtypes or devices that differ, an empty batch, a mask that is not made
            of 0 and 1, or NaN or infinity on a real token (with its position).
    """
    real = check_mask(mask, logps=logps, old_logps=old_logps)
    # Masked before anything that multiplies: 0 times a NaN would be a NaN in the gradient.
    log_ratios = torch.where(real, logps - old_logps.detach(), 0.0)
    if not log_ratios.detach().sum().isfinite():  # one pass; only a bad batch is searched
        check_tokens(real, logps=logps, old_logps=old_logps)
    return log_ratios, real


def clipped_surrogate(
    log_ratios: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*advantages"],
    epsilon_low: float,
    epsilon_high: float,
) -> Float[Tensor, "*shape"]:
    """min{w·A, clip(w, 1 − ε_low, 1 + ε_high)·A}, the objective of a token or of a response.

    Args:
        log_ratios: log w = log π_θ − log π_old, finite.
        advantages: A, finite; broadcasts to ``log_ratios``; data.

    Raises:
        ValueError: w·A overflows where A < 0, the side on which no clip bounds it.
    """
    advantages = advantages.detach().to(log_ratios.dtype)
    limit = math.log(torch.finfo(log_ratios.dtype).max) - 1e-3  # exp stays finite up to here
    if log_ratios.max() + advantages.abs().max().clamp(min=1).log() > limit:
        _refuse_overflow(log_ratios.detach(), advantages, limit)
        # Where the clip acts the gradient is 0; through an exp that overflowed it would be 0 · ∞.
        log_ratios = log_ratios.clamp(max=limit)
    ratios = log_ratios.exp()
    clipped = ratios.clamp(1 - epsilon_low, 1 + epsilon_high)
    return torch.minimum(ratios * advantages, clipped * advantages)


def _refuse_overflow(log_ratios: Tensor, advantages: Tensor, limit: float) -> None:
    too_large = log_ratios + advantages.abs().clamp(min=1).log() > limit
    bad = too_large & (advantages < 0)
    if bad.any():
        index = tuple(bad.nonzero()[0].tolist())
        raise ValueError(
            f"logps − old_logps at [{', '.join(map(str, index))}] is {log_ratios[index].item()}: "
            f"the ratio overflows {log_ratios.dtype}, and a negative advantage leaves it unclipped"
        )
