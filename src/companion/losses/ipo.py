"""Identity preference optimization, section 4.5.4.2."""

from jaxtyping import Float, Num
from torch import Tensor

from companion.losses.checks import check_counts, check_finite, check_positive, check_shapes


def ipo_loss(
    chosen_logps: Float[Tensor, " batch"],
    rejected_logps: Float[Tensor, " batch"],
    ref_chosen_logps: Float[Tensor, " batch"],
    ref_rejected_logps: Float[Tensor, " batch"],
    beta: float,
    chosen_lengths: Num[Tensor, " batch"] | None = None,
    rejected_lengths: Num[Tensor, " batch"] | None = None,
) -> Float[Tensor, ""]:
    """Mean squared distance of the log-ratio gap from 1/(2β).

    Without lengths the log-ratios are summed over tokens, as in the paper; with both lengths each
    is divided by its number of tokens, as TRL does.

    Args:
        chosen_logps: log π_θ(y_w|x) in nats, summed over the response's tokens (EOS included).
        rejected_logps: log π_θ(y_l|x), likewise.
        ref_chosen_logps: log π_ref(y_w|x); data, carries no gradient.
        ref_rejected_logps: log π_ref(y_l|x); data, carries no gradient.
        beta: β (the paper's τ), above 0.
        chosen_lengths: |y_w| in tokens, EOS included, at least 1.
        rejected_lengths: |y_l|, likewise.

    Returns:
        The loss, differentiable in the policy's log-probs.

    Raises:
        TypeError: a log-prob or length is no tensor, or β no number.
        ValueError: shapes, dtypes or devices that differ, an empty batch, NaN or infinity or a
            length below 1 (with its position), β ≤ 0, only one of the lengths, a loss that
            overflows the dtype.

    Source: Azar et al. 2023 (arXiv:2310.12036), eq. 17; TRL 1.12.0
        ``DPOTrainer._compute_loss`` with ``loss_type="ipo"``.
    """
    logps = dict(
        chosen_logps=chosen_logps,
        rejected_logps=rejected_logps,
        ref_chosen_logps=ref_chosen_logps,
        ref_rejected_logps=ref_rejected_logps,
    )
    check_shapes(1, **logps)
    check_finite(**logps)
    check_positive(beta=beta)
    if (chosen_lengths is None) != (rejected_lengths is None):
        missing = "chosen_lengths" if chosen_lengths is None else "rejected_lengths"
        raise ValueError(f"{missing} is missing: give both lengths, or neither")

    chosen_scores = chosen_logps - ref_chosen_logps.detach()
    rejected_scores = rejected_logps - ref_rejected_logps.detach()
    if chosen_lengths is not None:
        check_counts(chosen_logps, chosen_lengths=chosen_lengths, rejected_lengths=rejected_lengths)
        chosen_scores = chosen_scores / chosen_lengths.detach()
        rejected_scores = rejected_scores / rejected_lengths.detach()
    squares = (chosen_scores - rejected_scores - 1 / (2 * beta)) ** 2
    check_finite(squares=squares)  # finite log-probs and β may overflow together
    return squares.mean()
