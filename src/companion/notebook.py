"""What every notebook calls: the first cell's set-up, and the claims that hold a derivation up."""

import math
import os
import platform
import random
from collections.abc import Sequence
from importlib import metadata

import matplotlib
import numpy as np
import torch
from IPython import get_ipython
from matplotlib_inline.backend_inline import set_matplotlib_formats
from torch import Tensor

from companion import plots

Numbers = float | int | np.number | Sequence | np.ndarray | Tensor


def versions() -> dict[str, str]:
    """The versions that decide what a notebook shows: Python, torch, transformers, TRL."""
    found = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for package in ("torch", "transformers", "trl"):
        found[package] = metadata.version(package).split("+")[0]  # 2.13.0+cpu is 2.13.0
    return found


def where() -> str:
    """The preset and the device that runs use here."""
    from companion import training

    row = training.preset("dpo")  # which of the methods makes no difference to either
    return f"preset {row.name} · {row.device}"


def setup(seed: int = 0) -> None:
    """Ready a notebook: seeds, one torch thread, quiet libraries, Japanese figures, no hub.

    Prints one line with the versions, the preset and the device.
    """
    # The hub's client reads this when it is imported, which `training` does.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from companion import training

    training.quiet()
    torch.set_num_threads(1)  # two threads spin against each other beside another process
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    plots.use_style()
    if get_ipython() is None:
        matplotlib.use("Agg")  # the source runs as a plain script too
    else:
        set_matplotlib_formats("png", metadata=plots.METADATA)
    here = " · ".join(f"{name} {version}" for name, version in versions().items())
    print(f"{here} · {where()}")


def claim(text: str, left: Numbers, right: Numbers, tol: float = 1e-10) -> None:
    """Show that both sides of an equation agree, and raise when they do not.

    Args:
        text: the equation in the book's symbols.
        left, right: real numbers, arrays or tensors of them whose shapes broadcast, or lists of
            these; compared in float64.
        tol: the largest absolute difference that counts as equal.

    Raises:
        AssertionError: a difference above `tol`, a NaN, or shapes that do not broadcast; names
            the claim and the first bad position.
        TypeError: a side that is not made of real numbers in float64's range; names the place.
        ValueError: a side without a number in it, which would make any claim true, or a list
            whose items differ in shape.
    """
    left, right = _float64(left, f"{text}: left"), _float64(right, f"{text}: right")
    try:
        both = np.broadcast_arrays(left, right)
    except ValueError:
        raise AssertionError(
            f"{text}: 左辺の形状 {left.shape} と右辺の形状 {right.shape} が合いません"
        ) from None
    if both[0].size == 0:
        raise ValueError(f"{text}: left or right is empty, so nothing is compared")
    with np.errstate(invalid="ignore", over="ignore"):  # ∞ − ∞, which counts as equal
        difference = np.where(both[0] == both[1], 0.0, np.abs(both[0] - both[1]))
    bad = ~(difference <= tol)  # NaN compares false, so it is bad
    if bad.any():
        place = tuple(int(i) for i in np.argwhere(bad)[0])
        where = f"位置 {place} で" if place else ""
        raise AssertionError(
            f"{text}: {where}左辺 = {both[0][place]!s}、右辺 = {both[1][place]!s}、"
            f"差 {difference[place]:.1e} が許容差 {tol:.0e} を超えます"
        )
    print(f"✓ {text}   左辺 = {_brief(left)}   右辺 = {_brief(right)}   "
          f"最大差 {difference.max():.0e}")


def check(text: str, condition: bool | np.bool_ | Tensor, detail: str = "") -> None:
    """Show that an inequality or a trend holds, with its numbers in `detail`, or raise.

    Raises:
        AssertionError: `condition` is false; names the check and its numbers.
        ValueError: `condition` is not one truth value; a number is none.
    """
    truth = condition
    if isinstance(truth, np.bool_ | np.ndarray | Tensor) and math.prod(truth.shape) == 1:
        truth = truth.item()
    if not isinstance(truth, bool):
        raise ValueError(f"{text}: condition must be one truth value, not {condition!r}")
    if not truth:
        raise AssertionError(f"{text}: 成り立ちません   {detail}".rstrip())
    print(f"✓ {text}   {detail}".rstrip())


def _float64(values: Numbers, name: str) -> np.ndarray:
    """The numbers, lists and tensors unpacked; `name` says in a message what they are."""
    if isinstance(values, list | tuple):
        items = [_float64(item, f"{name}[{i}]") for i, item in enumerate(values)]
        shapes = sorted({item.shape for item in items})
        if len(shapes) > 1:
            raise ValueError(f"{name} has items of different shapes: {shapes}")
        return np.array(items)
    if isinstance(values, Tensor):
        if values.is_floating_point():
            values = values.double()  # NumPy has no bfloat16
        values = values.numpy(force=True)
    array = np.asarray(values)
    if array.dtype.kind not in "biuf":  # a Python int of more than 64 bits is an object
        kind = type(values).__name__ if array.dtype == object else array.dtype
        raise TypeError(f"{name} must be real numbers in float64's range, not {kind}")
    return array.astype(np.float64)


def _brief(values: np.ndarray) -> str:
    """A few numbers in full; of more, the first and the shape."""
    if values.ndim == 0:
        return f"{values:.6g}"
    if values.ndim == 1 and values.size <= 4:
        return "(" + ", ".join(f"{v:.6g}" for v in values) + ")"
    return f"{values.flat[0]:.6g}, … ({'×'.join(map(str, values.shape))} 個)"
