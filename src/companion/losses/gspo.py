"""Group sequence policy optimization, equations (5.22) to (5.25)."""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from companion.losses.checks import check_advantages, check_not_negative
from companion.losses.surrogate import clipped_surrogate, token_log_ratios


def gspo_loss(
    logps: Float[Tensor, "batch time"],
    old_logps: Float[Tensor, "batch time"],
    advantages: Float[Tensor, " batch"],
    mask: Shaped[Tensor, "batch time"],
    epsilon: float,
) -> Float[Tensor, ""]:
    """Negative objective of GSPO, (5.25): one ratio a response, the geometric mean over its tokens.

    Args:
        logps, old_logps, mask: as in `grpo_loss`. A response without a token counts as 0 in the
            mean.
        advantages: Â_i, one a response, from `group_advantages`; data.
        epsilon: ε of the clip of ξ_i, on both sides; small, since ξ_i varies less than a token's
            ratio.

    Returns:
        The loss, differentiable in ``logps``.

    Raises:
        TypeError: a tensor argument is no tensor, or ε no number.
        ValueError: shapes or devices that differ, NaN or infinity on a real token (with its
            position), ε < 0, a ratio that overflows where the advantage is negative.

    Source: book (5.22)–(5.25); Zheng et al. 2025 (arXiv:2507.18071), eq. 5–7; TRL 1.12.0
        ``GRPOTrainer._compute_loss`` with ``importance_sampling_level="sequence"``.
    """
    check_not_negative(epsilon=epsilon)
    log_ratios, real = token_log_ratios(logps, old_logps, mask)
    check_advantages(advantages, logps)

    lengths = real.sum(-1)
    log_xi = log_ratios.sum(-1) / lengths.clamp(min=1)  # (5.22)
    objective = clipped_surrogate(log_xi, advantages, epsilon, epsilon)
    return -torch.where(lengths > 0, objective, 0.0).mean()
