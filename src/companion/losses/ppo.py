"""Proximal policy optimization: (2.29), its value loss, and the rewards of (4.10)."""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from companion.losses.checks import (
    check_finite,
    check_mask,
    check_not_negative,
    check_shapes,
    check_tokens,
)
from companion.losses.surrogate import clipped_surrogate, token_log_ratios


def kl_penalized_rewards(
    scores: Float[Tensor, " batch"],
    logps: Float[Tensor, "batch time"],
    ref_logps: Float[Tensor, "batch time"],
    mask: Shaped[Tensor, "batch time"],
    beta: float,
) -> Float[Tensor, "batch time"]:
    """One reward a token, (4.10): −β·(log π_θ − log π_ref), and the score on the last one.

    Over a response they sum to r(x, y) − β·log(π_θ(y|x)/π_ref(y|x)).

    Args:
        scores: r_φ(x, y), one a response; of a response that was cut too.
        logps: log π_θ(y_t|x, y_<t) in nats, of the policy that sampled.
        ref_logps: log π_ref, likewise.
        mask: 1 on real completion tokens (EOS included).
        beta: β, weight of the KL penalty, at least 0.

    Returns:
        The rewards, data without a gradient, 0 under the mask.

    Raises:
        TypeError: a tensor argument is no tensor, or β no number.
        ValueError: shapes, dtypes or devices that differ, an empty batch, NaN or infinity (with
            its position), a row without a real token, β < 0.

    Source: book (4.10). TRL 1.12.0 (trl/experimental/ppo/ppo_trainer.py:756) puts the score one
        slot later, after the last token.
    """
    check_not_negative(beta=beta)
    real = check_mask(mask, logps=logps, ref_logps=ref_logps)
    check_tokens(real, logps=logps, ref_logps=ref_logps)
    check_shapes(1, scores=scores)
    if len(scores) != len(logps) or scores.device != logps.device:
        raise ValueError(
            f"scores must be ({len(logps)},) like the rows of logps, on {logps.device}, "
            f"got {tuple(scores.shape)} on {scores.device}"
        )
    check_finite(scores=scores)
    empty = ~real.any(-1)
    if empty.any():
        raise ValueError(f"mask[{empty.nonzero()[0].item()}] has no real token to carry the score")

    rewards = torch.where(real, -beta * (logps - ref_logps).detach(), 0.0)
    places = torch.arange(real.shape[1], device=real.device)
    last = torch.where(real, places, 0).amax(-1, keepdim=True)
    return rewards.scatter_add(1, last, scores.detach().to(rewards.dtype)[:, None])


def ppo_policy_loss(
    logps: Float[Tensor, "batch time"],
    old_logps: Float[Tensor, "batch time"],
    advantages: Float[Tensor, "batch time"],
    mask: Shaped[Tensor, "batch time"],
    epsilon: float,
) -> Float[Tensor, ""]:
    """Negative clipped surrogate, (2.29), in the mean over all real tokens of the batch.

    Args:
        logps: log π_θ(a_t|s_t) in nats.
        old_logps: log π_θold, likewise, at the time of sampling; data, carries no gradient.
        advantages: Â_t, one a token, from `gae`; data.
        mask: 1 on real tokens. What stands under 0 reaches neither the loss nor a gradient.
        epsilon: ε of the clip, on both sides.

    Returns:
        The loss, differentiable in ``logps``; 0 where there is no real token.

    Raises:
        TypeError: a tensor argument is no tensor, or ε no number.
        ValueError: shapes or devices that differ, an empty batch, NaN or infinity on a real token
            (with its position), ε < 0, a ratio that overflows where the advantage is negative.

    Source: book (2.29); Schulman et al. 2017 (arXiv:1707.06347), eq. 7; TRL 1.12.0
        (trl/experimental/ppo/ppo_trainer.py:826).
    """
    check_not_negative(epsilon=epsilon)
    log_ratios, real = token_log_ratios(logps, old_logps, mask)
    check_mask(mask, advantages=advantages)
    check_tokens(real, advantages=advantages)

    advantages = torch.where(real, advantages, 0.0)
    objective = clipped_surrogate(log_ratios, advantages, epsilon, epsilon)
    return -objective.sum() / real.sum().clamp(min=1)  # an advantage of 0 adds nothing


def ppo_value_loss(
    values: Float[Tensor, "batch time"],
    old_values: Float[Tensor, "batch time"],
    returns: Float[Tensor, "batch time"],
    mask: Shaped[Tensor, "batch time"],
    epsilon: float,
) -> Float[Tensor, ""]:
    """½·mean of the larger of two squares: of V − R, and of V clipped to V_old ± ε, less R.

    Args:
        values: V_θ(s_t).
        old_values: V at the time of sampling; data, carries no gradient.
        returns: Â_t + V_old(s_t), from `gae`; data.
        mask: 1 on real tokens. What stands under 0 reaches neither the loss nor a gradient.
        epsilon: how far the value may move before the clip takes its gradient.

    Returns:
        The loss, differentiable in ``values``; 0 where there is no real token.

    Raises:
        TypeError: a tensor argument is no tensor, or ε no number.
        ValueError: shapes, dtypes or devices that differ, an empty batch, NaN or infinity on a
            real token (with its position), ε < 0, squares that overflow.

    Source: TRL 1.12.0 (trl/experimental/ppo/ppo_trainer.py:814).
    """
    check_not_negative(epsilon=epsilon)
    tokens = dict(values=values, old_values=old_values, returns=returns)
    real = check_mask(mask, **tokens)
    check_tokens(real, **tokens)

    old_values, returns = old_values.detach(), returns.detach()
    values, old_values, returns = (torch.where(real, x, 0.0) for x in (values, old_values, returns))
    clipped = values.clamp(old_values - epsilon, old_values + epsilon)
    squares = torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)
    check_finite(squares=squares)
    return 0.5 * squares.sum() / real.sum().clamp(min=1)
