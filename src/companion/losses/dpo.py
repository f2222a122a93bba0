"""Direct preference optimization, equation (4.19)."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from companion.losses.checks import check_finite, check_positive, check_shapes


def dpo_loss(
    chosen_logps: Float[Tensor, " batch"],
    rejected_logps: Float[Tensor, " batch"],
    ref_chosen_logps: Float[Tensor, " batch"],
    ref_rejected_logps: Float[Tensor, " batch"],
    beta: float,
) -> Float[Tensor, ""]:
    """Mean negative log-likelihood of the preferences under the implicit reward, (4.19).

    Args:
        chosen_logps: log π_θ(y_w|x) in nats, summed over the response's tokens (EOS included).
        rejected_logps: log π_θ(y_l|x), likewise.
        ref_chosen_logps: log π_ref(y_w|x); data, carries no gradient.
        ref_rejected_logps: log π_ref(y_l|x); data, carries no gradient.
        beta: β, weight of the KL regularization, above 0.

    Returns:
        The loss, differentiable in the policy's log-probs.

    Raises:
        TypeError: a log-prob is no tensor, or β no number.
        ValueError: shapes, dtypes or devices that differ, an empty batch, NaN or infinity (with
            its position), β ≤ 0, a margin that overflows the dtype.

    Source: book (4.19); Rafailov et al. 2023 (arXiv:2305.18290), eq. 7;
        TRL 1.12.0 ``DPOTrainer._compute_loss`` with ``loss_type="sigmoid"``.
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

    chosen_logratios = chosen_logps - ref_chosen_logps.detach()
    rejected_logratios = rejected_logps - ref_rejected_logps.detach()
    margin = beta * (chosen_logratios - rejected_logratios)
    check_finite(margin=margin)  # finite log-probs and β may overflow together
    return -F.logsigmoid(margin).mean()
