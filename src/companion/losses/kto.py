"""Kahneman–Tversky optimization, equations (4.29) to (4.32)."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from companion.losses.checks import check_finite, check_positive, check_shapes


def kto_reference_point(
    mismatched_logps: Float[Tensor, " batch"], ref_mismatched_logps: Float[Tensor, " batch"]
) -> Float[Tensor, ""]:
    """The reference point z_0: the mean log-ratio of mismatched pairs, not below 0.

    A pair is mismatched when the response belongs to another prompt of the batch; TRL rotates the
    responses by one. The mean estimates KL(π_θ‖π_ref) with a bias, and is often negative.

    Args:
        mismatched_logps: log π_θ(y'|x) in nats, summed over tokens.
        ref_mismatched_logps: log π_ref(y'|x), likewise.

    Returns:
        z_0 in nats, data without a gradient.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: fewer than two rows, of which none is a mismatch; shapes, dtypes or devices
            that differ; NaN or infinity (with its position).

    Source: Ethayarajh et al. 2024 (arXiv:2402.01306); TRL 1.12.0 ``KTOTrainer._compute_loss``.
    """
    logps = dict(mismatched_logps=mismatched_logps, ref_mismatched_logps=ref_mismatched_logps)
    check_shapes(1, **logps)
    check_finite(**logps)
    if len(mismatched_logps) < 2:
        raise ValueError("mismatched_logps needs at least 2 rows: a single one has no mismatch")
    return (mismatched_logps - ref_mismatched_logps).mean().clamp(min=0).detach()


def kto_loss(
    logps: Float[Tensor, " batch"],
    ref_logps: Float[Tensor, " batch"],
    desirable: Bool[Tensor, " batch"],
    reference_point: Float[Tensor, ""],
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Float[Tensor, ""]:
    """Mean of w·(1 − value) over the batch, (4.29)–(4.32).

    The value of a desirable response is σ(β(log-ratio − z_0)), of an undesirable one
    σ(β(z_0 − log-ratio)).

    Args:
        logps: log π_θ(y|x) in nats, summed over the response's tokens (EOS included).
        ref_logps: log π_ref(y|x); data, carries no gradient.
        desirable: True where the response is desirable.
        reference_point: z_0, from `kto_reference_point`; data.
        beta: β, above 0.
        desirable_weight: w_+, above 0.
        undesirable_weight: w_-, above 0.

    Returns:
        The loss, differentiable in ``logps``.

    Raises:
        TypeError: a tensor argument is no tensor, or a number no number.
        ValueError: shapes, dtypes or devices that differ, an empty batch, labels that are not
            bool, NaN or infinity (with its position), a number ≤ 0, a value that overflows.

    Source: book (4.29)–(4.32); Ethayarajh et al. 2024 (arXiv:2402.01306), eq. 7–8; TRL 1.12.0
        ``KTOTrainer._compute_loss``.
    """
    check_shapes(1, logps=logps, ref_logps=ref_logps)
    check_finite(logps=logps, ref_logps=ref_logps, reference_point=reference_point)
    check_positive(
        beta=beta, desirable_weight=desirable_weight, undesirable_weight=undesirable_weight
    )
    if desirable.dtype != torch.bool:
        raise ValueError(f"desirable must be bool, got {desirable.dtype}")
    if desirable.shape != logps.shape:
        raise ValueError(
            f"desirable must have the shape of logps: "
            f"{tuple(logps.shape)}, got {tuple(desirable.shape)}"
        )
    if reference_point.dim() != 0:
        raise ValueError(f"reference_point must be a scalar, got {tuple(reference_point.shape)}")

    gain = beta * (logps - ref_logps.detach() - reference_point.detach())
    check_finite(gain=gain)  # finite log-probs and β may overflow together
    losses = torch.where(
        desirable,
        desirable_weight * (1 - torch.sigmoid(gain)),
        undesirable_weight * (1 - torch.sigmoid(-gain)),
    )
    return losses.mean()
