"""Dr. GRPO: GRPO without its two biases, equations (5.10) to (5.12)."""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from companion.losses.checks import (
    check_advantages,
    check_not_negative,
    check_positive,
)
from companion.losses.surrogate import clipped_surrogate, token_log_ratios


def dr_grpo_loss(
    logps: Float[Tensor, "batch time"],
    old_logps: Float[Tensor, "batch time"],
    advantages: Float[Tensor, " batch"],
    mask: Shaped[Tensor, "batch time"],
    epsilon: float,
    max_completion_length: int,
) -> Float[Tensor, ""]:
    """Negative objective of Dr. GRPO, (5.11): the *sum* over a response's tokens.

    Args:
        logps, old_logps, mask, epsilon: as in `grpo_loss`.
        advantages: Â_i^Dr, one a response, from ``group_advantages(..., scale="none")``; data.
        max_completion_length: a constant by which TRL divides besides the number of responses;
            1 gives (5.11) itself.

    Returns:
        The loss, differentiable in ``logps``.

    Raises:
        TypeError: a tensor argument is no tensor, or a number no number.
        ValueError: shapes or devices that differ, NaN or infinity on a real token (with its
            position), ε < 0, ``max_completion_length`` ≤ 0, a ratio that overflows where the
            advantage is negative.

    Source: book (5.11), (5.12); Liu et al. 2025 (arXiv:2503.20783); TRL 1.12.0
        ``GRPOTrainer._compute_loss`` with ``loss_type="dr_grpo"``.
    """
    check_not_negative(epsilon=epsilon)
    check_positive(max_completion_length=max_completion_length)
    log_ratios, real = token_log_ratios(logps, old_logps, mask)
    check_advantages(advantages, logps)

    objective = clipped_surrogate(log_ratios, advantages[:, None], epsilon, epsilon)
    return -torch.where(real, objective, 0.0).sum() / (len(logps) * max_completion_length)
