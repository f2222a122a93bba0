"""Generalized advantage estimation, and the whitening that PPO puts after it."""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from companion.losses.checks import check_mask, check_right_padded, check_tokens, check_unit


def gae(
    rewards: Float[Tensor, "batch time"],
    values: Float[Tensor, "batch time"],
    mask: Shaped[Tensor, "batch time"],
    gamma: float = 1.0,
    lam: float = 0.95,
) -> tuple[Float[Tensor, "batch time"], Float[Tensor, "batch time"]]:
    """Advantages Â_t = δ_t + γλ·Â_{t+1} with δ_t = r_t + γ·V_{t+1} − V_t, and returns Â_t + V_t.

    Args:
        rewards: r_t, one a token.
        values: V(s_t), before token t. After a row's last real token V is 0: the response is over.
        mask: 1 on real tokens, then 0: padded on the right, without holes. What stands under 0
            reaches nothing.
        gamma: discount γ, from 0 to 1.
        lam: λ, from 0 (TD error) to 1 (return − V).

    Returns:
        (advantages, returns), data without a gradient, 0 under the mask.

    Raises:
        TypeError: a tensor argument is no tensor, or γ or λ no number.
        ValueError: shapes, dtypes or devices that differ, an empty batch, NaN or infinity on a
            real token (with its position), a mask with a hole, γ or λ outside [0, 1].

    Source: Schulman et al. 2016 (arXiv:1506.02438), eq. 16; TRL 1.12.0
        (trl/experimental/ppo/ppo_trainer.py:770).
    """
    check_unit(gamma=gamma, lam=lam)
    real = check_mask(mask, rewards=rewards, values=values)
    check_tokens(real, rewards=rewards, values=values)
    check_right_padded(real)
    rewards = torch.where(real, rewards.detach(), 0.0)
    values = torch.where(real, values.detach(), 0.0)

    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = delta + gamma * lam * next_advantage  # stays 0 over the padding
        next_value = values[:, t]
        advantages[:, t] = next_advantage
    return advantages, advantages + values


def whiten(
    values: Float[Tensor, "batch time"],
    mask: Shaped[Tensor, "batch time"],
    shift_mean: bool = True,
) -> Float[Tensor, "batch time"]:
    """Scale to variance 1 over the real tokens, and shift to mean 0 unless told not to.

    Args:
        values: what is whitened: advantages, or rewards.
        mask: 1 on real tokens.
        shift_mean: False puts the mean back after scaling, as TRL does for rewards.

    Returns:
        (x − mean)·rsqrt(var + 1e-8) with the unbiased variance, data without a gradient, 0 under
        the mask. With fewer than two real tokens, which have no variance, all is 0.

    Raises:
        TypeError: a tensor argument is no tensor.
        ValueError: shapes or devices that differ, an empty batch, NaN or infinity on a real token
            (with its position).

    Source: TRL 1.12.0 ``masked_whiten`` (trl/experimental/ppo/ppo_trainer.py:264).
    """
    real = check_mask(mask, values=values)
    check_tokens(real, values=values)
    count = real.sum()
    if count < 2:
        return torch.zeros_like(values)
    values = torch.where(real, values.detach(), 0.0)
    mean = values.sum() / count
    deviations = torch.where(real, values - mean, 0.0)
    whitened = deviations * torch.rsqrt((deviations**2).sum() / (count - 1) + 1e-8)
    return whitened if shift_mean else torch.where(real, whitened + mean, 0.0)
