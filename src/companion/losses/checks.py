"""The input checks that the losses share. Each names the argument and the first bad position."""

import sys
from numbers import Integral, Real

import torch
from torch import Tensor


def check_shapes(dims: int, **tensors: Tensor) -> None:
    """Require floating-point tensors of one common, non-empty shape with ``dims`` dimensions.

    Broadcasting is refused on purpose: log-probs of shape (B,) against (B, 1) would silently
    give B x B differences.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: an argument has another shape, dtype or device than the first.
    """
    first_name, first = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if not tensor.is_floating_point():
            raise ValueError(f"{name} must be floating point, got {tensor.dtype}")
        if tensor.dim() != dims:
            raise ValueError(f"{name} must have {dims} dimension(s), got {tuple(tensor.shape)}")
        if tensor.numel() == 0:
            raise ValueError(f"{name} is empty: {tuple(tensor.shape)}")
        for what in ("shape", "dtype", "device"):
            value, expected = getattr(tensor, what), getattr(first, what)
            if value != expected:
                raise ValueError(
                    f"{name} must have the {what} of {first_name}: "
                    f"{_plain(expected)}, got {_plain(value)}"
                )


def check_finite(**tensors: Tensor) -> None:
    """Require finite values everywhere.

    Raises:
        ValueError: names the argument, the index of its first NaN or infinity, and the value.
    """
    for name, tensor in tensors.items():
        if not tensor.detach().sum().isfinite():  # one pass; only a bad tensor is searched
            _refuse(~torch.isfinite(tensor.detach()), name, tensor, "must be finite")


def check_positive(**numbers: float | int) -> None:
    """Require finite numbers above 0.

    Raises:
        TypeError: an argument is no real number.
        ValueError: an argument is 0, negative, NaN or infinite.
    """
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, Real):
            raise TypeError(f"{name} must be a number, got {type(number).__name__}")
        if not 0 < number <= sys.float_info.max:
            raise ValueError(f"{name} must be a finite number above 0, got {number}")


def check_not_negative(**numbers: float | int) -> None:
    """Require finite numbers of at least 0.

    Raises:
        TypeError: an argument is no real number.
        ValueError: an argument is negative, NaN or infinite.
    """
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, Real):
            raise TypeError(f"{name} must be a number, got {type(number).__name__}")
        if not 0 <= number <= sys.float_info.max:
            raise ValueError(f"{name} must be a finite number of at least 0, got {number}")


def check_unit(**numbers: float | int) -> None:
    """Require numbers from 0 to 1.

    Raises:
        TypeError: an argument is no real number.
        ValueError: an argument is outside [0, 1], or NaN.
    """
    check_not_negative(**numbers)
    for name, number in numbers.items():
        if number > 1:
            raise ValueError(f"{name} must be at most 1, got {number}")


def check_right_padded(real: Tensor) -> None:
    """Require rows of a mask whose real tokens come first, without holes.

    Raises:
        ValueError: names the first token that comes after a gap.
    """
    after_a_gap = real[:, 1:] & ~real[:, :-1]
    if after_a_gap.any():
        row, t = after_a_gap.nonzero()[0].tolist()
        raise ValueError(
            f"mask[{row}, {t + 1}] is 1 after a 0: must be padded on the right, without holes"
        )


def check_group_size(group_size: int, rows: int) -> None:
    """Require a G that makes groups of at least two, all of them whole.

    Raises:
        TypeError: ``group_size`` is no whole number.
        ValueError: G < 2, no row, or a last group that is not whole.
    """
    if isinstance(group_size, bool) or not isinstance(group_size, Integral):
        raise TypeError(f"group_size must be a whole number, got {type(group_size).__name__}")
    if group_size < 2:
        raise ValueError(f"group_size is {group_size}: a group needs G ≥ 2 to compare with")
    if rows == 0 or rows % group_size:
        raise ValueError(
            f"rewards has {rows} rows: must be a multiple of group_size = {group_size}, and not 0"
        )


def check_mask(mask: Tensor, **logps: Tensor) -> Tensor:
    """Require (batch, time) log-probs and a mask of 0 and 1 over them.

    Returns:
        The mask as bool, True on real tokens.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: shapes, dtypes or devices that differ, an empty batch, a mask that is not made
            of 0 and 1 (with its first other value).
    """
    check_shapes(2, **logps)
    first_name, first = next(iter(logps.items()))
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask must be a torch.Tensor, got {type(mask).__name__}")
    if mask.shape != first.shape or mask.device != first.device:
        raise ValueError(
            f"mask must have the shape and device of {first_name}: {tuple(first.shape)} on "
            f"{first.device}, got {tuple(mask.shape)} on {mask.device}"
        )
    if mask.dtype == torch.bool:
        return mask
    real = mask.bool()
    _refuse(mask != real, "mask", mask, "must be 0 or 1")
    return real


def check_tokens(real: Tensor, **logps: Tensor) -> None:
    """Require log-probs that are finite where ``real`` is True.

    Raises:
        ValueError: names the argument, the index of its first NaN or infinity, and the value.
    """
    for name, tensor in logps.items():
        bad = real & ~torch.isfinite(tensor.detach())
        _refuse(bad, name, tensor, "must be finite on a real token")


def check_advantages(advantages: Tensor, like: Tensor) -> None:
    """Require finite advantages, one for each row of ``like``.

    Raises:
        TypeError: ``advantages`` is no tensor.
        ValueError: another shape or device, or a value that is not finite (with its position).
    """
    check_shapes(1, advantages=advantages)
    if len(advantages) != len(like) or advantages.device != like.device:
        raise ValueError(
            f"advantages must be ({len(like)},) like the rows of logps, on {like.device}, "
            f"got {tuple(advantages.shape)} on {advantages.device}"
        )
    check_finite(advantages=advantages)


def check_counts(like: Tensor, **counts: Tensor) -> None:
    """Require tensors of the shape and device of ``like``, with finite values of at least 1.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: names the argument, and the index of its first value below 1.
    """
    for name, tensor in counts.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.shape != like.shape or tensor.device != like.device:
            raise ValueError(
                f"{name} must have the shape and device of the log-probs: "
                f"{tuple(like.shape)} on {like.device}, "
                f"got {tuple(tensor.shape)} on {tensor.device}"
            )
        good = (tensor >= 1) & torch.isfinite(tensor)  # NaN compares false
        _refuse(~good, name, tensor, "must be at least 1")


def _refuse(bad: Tensor, name: str, tensor: Tensor, must: str) -> None:
    if bad.any():
        index = tuple(bad.nonzero()[0].tolist())
        where = f"[{', '.join(map(str, index))}]" if index else ""
        raise ValueError(f"{name}{where} is {tensor[index].item()}: {must}")


def _plain(value: object) -> object:
    return tuple(value) if isinstance(value, torch.Size) else value
