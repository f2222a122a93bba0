"""Advantages relative to a group, (5.1), (5.10), (5.18), (5.23), and groups that have none."""

import math
import warnings
from collections.abc import Hashable, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from companion.losses.checks import check_group_size

STD_EPSILON = 1e-4  # as TRL


def group_advantages(
    rewards: Float[Tensor, " batch"] | Sequence[float | int | None],
    group_size: int,
    scale: str = "group",
    prompts: Sequence[Hashable] | None = None,
) -> Float[Tensor, " batch"]:
    """How much better a response is than the mean of its group: (r − mean) or that over the std.

    Args:
        rewards: r_i, the rows of a prompt one after the other. NaN, or None in a list, is a
            response that was not scored: left out of mean and std, its advantage is 0.
        group_size: G, responses per prompt, at least 2.
        scale: "group" divides by std + 1e-4, where std has the divisor n − 1; "none" does not.
        prompts: what each row answers, where rows are not in order: they are grouped by it.

    Returns:
        The advantages, data without a gradient, in the order of the rewards. Where all scored
        rewards of a group are equal they are exactly 0.

    Raises:
        TypeError: ``group_size`` is no whole number.
        ValueError: G < 2, a number of rows that G does not divide, an infinite reward (with its
            position), rewards whose mean or std overflow, an unknown scale, or prompts of which
            one has no multiple of G rows.

    Warns:
        UserWarning: no row at all is scored.

    Source: book (5.1), (5.10), (5.18), (5.23); TRL 1.12.0 (trl/trainer/grpo_trainer.py:2776).
    """
    if scale not in ("group", "none"):
        raise ValueError(f"scale is {scale!r}: must be 'group' or 'none'")
    rewards = _rewards(rewards, group_size)
    if torch.isnan(rewards).all():
        warnings.warn("no row of rewards is scored: all advantages are 0", stacklevel=2)
    order = _order(prompts, group_size, len(rewards))
    groups = rewards[order].unflatten(0, (-1, group_size))

    scored = ~torch.isnan(groups)
    count = scored.sum(-1, keepdim=True)
    mean = torch.where(scored, groups, 0.0).sum(-1, keepdim=True) / count.clamp(min=1)
    # Equal rewards: their mean in floating point need not be equal to them.
    deviations = torch.where(scored & ~_all_equal(groups)[:, None], groups - mean, 0.0)
    if scale == "group":
        variance = (deviations**2).sum(-1, keepdim=True) / (count - 1).clamp(min=1)
        deviations = deviations / (variance.sqrt() + STD_EPSILON)
        too_large = ~torch.isfinite(variance).squeeze(-1)
    else:
        too_large = ~torch.isfinite(deviations).all(-1)
    if too_large.any():
        row = order[too_large.nonzero()[0].item() * group_size].item()
        raise ValueError(f"rewards of the group of rewards[{row}] overflow {rewards.dtype}")
    return torch.empty_like(rewards).index_put_((order,), deviations.flatten())


def degenerate_groups(
    rewards: Float[Tensor, " batch"] | Sequence[float | int | None], group_size: int
) -> Bool[Tensor, " groups"]:
    """Which groups teach nothing, because all their scored rewards are equal: (5.14), (5.17).

    Args:
        rewards, group_size: as in `group_advantages`. For (5.17) the rewards are those of
            correctness alone, before any penalty is added.

    Returns:
        One bool a group, (B/G,). A group with fewer than two scored responses is degenerate.

    Raises:
        TypeError, ValueError: as `group_advantages`.

    Source: book (5.14), (5.17); Yu et al. 2025 (arXiv:2503.14476), eq. 11.
    """
    return _all_equal(_rewards(rewards, group_size).unflatten(0, (-1, group_size)))


def _rewards(rewards: Tensor | Sequence[float | int | None], group_size: int) -> Tensor:
    if not isinstance(rewards, Tensor):
        rewards = torch.tensor([math.nan if r is None else float(r) for r in rewards])
    if rewards.dim() != 1:
        raise ValueError(f"rewards must have 1 dimension, got {tuple(rewards.shape)}")
    if not rewards.is_floating_point():
        raise ValueError(f"rewards must be floating point, got {rewards.dtype}")
    check_group_size(group_size, len(rewards))
    rewards = rewards.detach()
    infinite = torch.isinf(rewards)
    if infinite.any():
        row = infinite.nonzero()[0].item()
        raise ValueError(f"rewards[{row}] is {rewards[row].item()}: must be finite, or NaN")
    return rewards


def _all_equal(groups: Tensor) -> Tensor:
    unscored = torch.isnan(groups)
    highest = groups.masked_fill(unscored, -math.inf).amax(-1)
    lowest = groups.masked_fill(unscored, math.inf).amin(-1)
    return highest <= lowest  # −∞ and ∞ where nothing is scored


def _order(prompts: Sequence[Hashable] | None, group_size: int, rows: int) -> Tensor:
    """The rows, group after group."""
    if prompts is None:
        return torch.arange(rows)
    if len(prompts) != rows:
        raise ValueError(f"prompts has {len(prompts)} rows, rewards {rows}")
    members: dict[Hashable, list[int]] = {}
    for row, prompt in enumerate(prompts):
        members.setdefault(prompt, []).append(row)
    for found in members.values():
        if len(found) % group_size:
            raise ValueError(
                f"prompts[{found[0]}] has {len(found)} rows: must be a multiple of "
                f"group_size = {group_size}"
            )
    return torch.tensor([row for found in members.values() for row in found])
