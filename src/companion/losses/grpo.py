"""Group relative policy optimization, equations (5.4) to (5.7)."""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from companion.losses.checks import (
    check_advantages,
    check_finite,
    check_not_negative,
    check_shapes,
)
from companion.losses.surrogate import clipped_surrogate, token_log_ratios


def kl_k3(
    logps: Float[Tensor, "*shape"], ref_logps: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """The estimator of D_KL[π_θ‖π_ref] per token, (5.7): e^d − d − 1 with d = log π_ref − log π_θ.

    Args:
        logps: log π_θ(y_t|x, y_<t) in nats, of tokens drawn from π_θ.
        ref_logps: log π_ref, likewise; data, carries no gradient.

    Returns:
        One value a token, at least 0 up to rounding, differentiable in ``logps``.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: shapes, dtypes or devices that differ, NaN or infinity (with its position),
            a difference whose exp overflows.

    Source: book (5.7); Schulman 2020, http://joschu.net/blog/kl-approx.html, "k3".
    """
    both = dict(logps=logps, ref_logps=ref_logps)
    check_shapes(logps.dim() if isinstance(logps, Tensor) else 0, **both)
    check_finite(**both)
    d = ref_logps.detach() - logps
    estimates = torch.expm1(d) - d  # e^d − 1 would lose all digits of a small d
    check_finite(estimates=estimates)
    return estimates


def grpo_loss(
    logps: Float[Tensor, "batch time"],
    old_logps: Float[Tensor, "batch time"],
    advantages: Float[Tensor, " batch"],
    mask: Shaped[Tensor, "batch time"],
    epsilon: float,
    ref_logps: Float[Tensor, "batch time"] | None = None,
    beta: float = 0.0,
) -> Float[Tensor, ""]:
    """Negative objective of GRPO, (5.4): the mean over a response's tokens, then over responses.

    Args:
        logps: log π_θ(y_{i,t}|x, y_{i,<t}) in nats.
        old_logps: log π_θold, likewise, at the time of sampling; data, carries no gradient.
        advantages: Â_i, one a response, from `group_advantages`; data.
        mask: 1 on real completion tokens (EOS included), 0 elsewhere. What stands under 0 reaches
            neither the loss nor a gradient. A response without a token counts as 0 in the mean.
        epsilon: ε of the clip, on both sides.
        ref_logps: log π_ref; data. Needed when β is not 0.
        beta: β, weight of the KL term. Its estimator is k3, without importance weights:
            TRL's ``use_bias_correction_kl=False``.

    Returns:
        The loss, differentiable in ``logps``.

    Raises:
        TypeError: a tensor argument is no tensor, or ε or β no number.
        ValueError: shapes or devices that differ, NaN or infinity on a real token (with its
            position), ε or β < 0, β without ``ref_logps``, a ratio that overflows where the
            advantage is negative.

    Source: book (5.4)–(5.7); Shao et al. 2024 (arXiv:2402.03300), eq. 3; TRL 1.12.0
        ``GRPOTrainer._compute_loss`` with ``loss_type="grpo"``.
    """
    check_not_negative(epsilon=epsilon, beta=beta)
    log_ratios, real = token_log_ratios(logps, old_logps, mask)
    check_advantages(advantages, logps)

    objective = clipped_surrogate(log_ratios, advantages[:, None], epsilon, epsilon)
    if beta != 0:
        if ref_logps is None:
            raise ValueError(f"ref_logps is missing: β = {beta} needs the reference")
        check_shapes(2, logps=logps, ref_logps=ref_logps)
        kl = kl_k3(torch.where(real, logps, 0.0), torch.where(real, ref_logps, 0.0))
        objective = objective - beta * kl
    responses = torch.where(real, objective, 0.0).sum(-1) / real.sum(-1).clamp(min=1)
    return -responses.mean()
