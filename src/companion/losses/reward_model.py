"""The reward model's loss, equation (4.8)."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from companion.losses.checks import check_finite, check_shapes


def reward_model_loss(
    rewards_chosen: Float[Tensor, " batch"], rewards_rejected: Float[Tensor, " batch"]
) -> Float[Tensor, ""]:
    """Mean negative log-likelihood of the preferences under Bradley–Terry, (4.8).

    Args:
        rewards_chosen: r_φ(x, y_w).
        rewards_rejected: r_φ(x, y_l).

    Returns:
        The loss, differentiable in both rewards.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: shapes, dtypes or devices that differ, an empty batch, NaN or infinity (with
            its position), a difference that overflows the dtype.

    Source: book (4.8); TRL 1.12.0 ``RewardTrainer.compute_loss`` without margin.
    """
    rewards = dict(rewards_chosen=rewards_chosen, rewards_rejected=rewards_rejected)
    check_shapes(1, **rewards)
    check_finite(**rewards)

    margin = rewards_chosen - rewards_rejected
    check_finite(margin=margin)
    return -F.logsigmoid(margin).mean()
