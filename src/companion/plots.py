"""The few pictures that every notebook shares.

Each function returns a matplotlib Figure, so a cell shows it by ending in the call, and a plain
script may save it. The figures are made without pyplot: nothing is shown twice and none stays in
memory.
"""

import math
from collections.abc import Mapping, Sequence

import matplotlib
import matplotlib_fontja
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor

# Okabe and Ito's colours, told apart by colour-blind readers too; the accent comes first.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
INK = "#333333"
GREY = "#8A8A8A"

# No version of matplotlib in the file: the same picture is the same bytes.
METADATA = {"Software": None}

STYLE = {
    # IPAexGothic has the Japanese, DejaVu Sans what it lacks: ≤ ≥ ∑.
    "font.family": ["IPAexGothic", "DejaVu Sans"],
    "font.size": 10,
    "axes.unicode_minus": False,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titlepad": 9,
    "axes.labelsize": 9.5,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#B8B8B8",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.prop_cycle": matplotlib.cycler(color=COLOURS),
    "grid.color": "#E8E8E8",
    "grid.linewidth": 0.8,
    "xtick.color": "#B8B8B8",
    "ytick.color": "#B8B8B8",
    "xtick.labelcolor": "#555555",
    "ytick.labelcolor": "#555555",
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "text.color": INK,
    "lines.linewidth": 1.9,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "figure.dpi": 100,
    "savefig.dpi": 100,
    "savefig.bbox": None,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.w_pad": 0.09,
    "figure.constrained_layout.h_pad": 0.07,
}

Numbers = Sequence | np.ndarray | Tensor

PANEL = (3.9, 2.6)  # inches


def use_style() -> None:
    """Make the companion's look and its Japanese fonts matplotlib's defaults."""
    matplotlib_fontja.japanize()  # registers IPAexGothic
    matplotlib.rcParams.update(STYLE)


def figure(
    rows: int = 1, columns: int = 1, *, panel: tuple[float, float] = PANEL
) -> tuple[Figure, np.ndarray]:
    """An empty figure in the companion's style and its axes, an array of shape (rows, columns).

    Args:
        panel: width and height of one panel in inches.
    """
    use_style()
    drawn = Figure(figsize=(panel[0] * columns, panel[1] * rows))
    return drawn, drawn.subplots(rows, columns, squeeze=False)


def curves(
    history: pd.DataFrame | Mapping[str, Sequence | np.ndarray],
    panels: Mapping[str, str | Mapping[str, str]],
    *,
    x: str | None = None,
    xlabel: str = "更新回数",
    columns: int = 3,
) -> Figure:
    """Small multiples of a training history, one panel a quantity.

    Args:
        history: columns by name, one row per logged step; a row without a value is left out.
        panels: panel title -> column, or -> {line label: column} for several lines in a panel.
        x: the column of the horizontal axis; without it "step" where there is one, else the rows
            counted from 1.
        columns: panels in a row at most.

    Raises:
        ValueError: a column that is not in the history, or has no value in it; or no panel.
    """
    if not panels:
        raise ValueError("panels is empty: name at least one column to draw")
    table = pd.DataFrame(history)
    if x is None and "step" in table:
        x = "step"
    rows_counted = pd.Series(range(1, len(table) + 1), table.index)
    across = rows_counted if x is None else _column(table, x)
    rows = math.ceil(len(panels) / columns)
    columns = math.ceil(len(panels) / rows)  # four panels are 2 x 2, not 3 + 1
    drawn, axes = figure(rows, columns)
    for ax, (title, wanted) in zip(axes.flat, panels.items(), strict=False):
        lines = {"": wanted} if isinstance(wanted, str) else wanted
        for label, name in lines.items():
            values = _column(table, name).dropna()
            ax.plot(across[values.index], values, label=label)
        ax.set_title(title)
        ax.set_xlabel(xlabel)
        _label_ends(ax)
    for ax in axes.flat[len(panels):]:
        ax.set_axis_off()
    return drawn


def spread(
    x: Numbers,
    ys: Numbers | Mapping[str, Numbers],
    label: str = "",
    *,
    ax: Axes | None = None,
    colour: str | None = None,
    title: str = "",
    xlabel: str = "",
    ylabel: str = "",
    yscale: str = "linear",
) -> Figure:
    """Median over seeds as a line, minimum to maximum as a band.

    Args:
        x: (length,)
        ys: (seeds, length), or {label: (seeds, length)} for several lines.
        label: stands at the line's end, when `ys` is one array.
        ax: draw here, over what is there, instead of in a figure of its own.
        colour: of one array's line; else the next of the palette.

    Raises:
        ValueError: an array that is not (seeds, length of x), or holds a NaN.
    """
    x = np.asarray(x, dtype=float)
    lines = ys if isinstance(ys, Mapping) else {label: ys}
    if ax is None:
        _, axes = figure(panel=(5.6, 3.3))
        ax = axes[0, 0]
    taken = len(_labelled(ax))  # a rule across the panel takes no colour
    for number, (name, values) in enumerate(lines.items()):
        values = np.asarray(values, dtype=float)  # a tensor on the CPU too
        where = f"ys[{name!r}]" if isinstance(ys, Mapping) else "ys"
        if values.ndim != 2 or values.shape[1] != len(x):
            raise ValueError(f"{where} must be (seeds, {len(x)}), not {values.shape}")
        if np.isnan(values).any():
            seed, step = np.argwhere(np.isnan(values))[0]
            raise ValueError(f"{where} is NaN at seed {seed}, position {step}")
        tint = colour or COLOURS[(taken + number) % len(COLOURS)]
        ax.fill_between(x, values.min(0), values.max(0), color=tint, alpha=0.18, linewidth=0)
        ax.plot(x, np.median(values, 0), color=tint, label=name)
    ax.set_yscale(yscale)
    for put, text in ((ax.set_title, title), (ax.set_xlabel, xlabel), (ax.set_ylabel, ylabel)):
        if text:
            put(text)
    _label_ends(ax)
    return ax.figure


def before_after(
    measures: Mapping[str, Sequence],
    *,
    stages: Sequence[str] = ("学習前", "学習後"),
    limits: Sequence | None = None,
    digits: int = 2,
    title: str = "",
) -> Figure:
    """What training changed: a measure a row, its value before and after joined by a line.

    Args:
        measures: name -> (before, after).
        stages: what stands over the two dots of the first row.
        limits: ends of the axis; (0, 1) for shares.

    Raises:
        ValueError: no measure, or one without exactly two finite values.
    """
    if not measures:
        raise ValueError("measures is empty: give at least one name -> (before, after)")
    for name, pair in measures.items():
        if np.shape(pair) != (2,) or not np.isfinite(pair).all():
            raise ValueError(f"measures[{name!r}] must be two finite numbers, not {pair}")
    drawn, axes = figure(panel=(6.2, 1.15 + 0.5 * len(measures)))
    ax = axes[0, 0]
    ax.grid(axis="x")
    ax.grid(visible=False, axis="y")
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0, labelcolor=INK, labelsize=10)
    for row, (before, after) in enumerate(measures.values()):
        ax.plot([before, after], [row, row], color="#CFCFCF", linewidth=3, zorder=1)
        left = before <= after
        for value, colour, outer in ((before, GREY, left), (after, COLOURS[0], not left)):
            ax.plot(value, row, "o", color=colour, markersize=8, zorder=2, clip_on=False)
            ax.annotate(f"{value:.{digits}f}", (value, row), xytext=(-9 if outer else 9, 0),
                        textcoords="offset points", va="center", color=colour, fontsize=9.5,
                        ha="right" if outer else "left")
            if row == 0:
                ax.annotate(stages[0] if colour == GREY else stages[1], (value, row),
                            xytext=(0, 11), textcoords="offset points", color=colour,
                            ha="right" if outer else "left", fontsize=9.5)
    ax.set_yticks(range(len(measures)), list(measures))
    ax.set_ylim(len(measures) - 0.5, -0.9)
    if limits:
        ax.set_xlim(*limits)
    ax.margins(x=0.12)
    if title:
        ax.set_title(title)
    return drawn


def _column(table: pd.DataFrame, name: str) -> pd.Series:
    if name not in table:
        raise ValueError(f"column {name!r} is not in the history, which has: {', '.join(table)}")
    if table[name].isna().all():
        raise ValueError(f"column {name!r} has no value in the history")
    return table[name]


def _labelled(ax: Axes) -> list[Line2D]:
    """The lines of data: matplotlib's own labels, of rules and the like, begin with "_"."""
    return [line for line in ax.lines if line.get_label() and line.get_label()[0] != "_"]


def _label_ends(ax: Axes) -> None:
    """Put each line's label at its right end, in its colour, none over another."""
    for text in [text for text in ax.texts if text.get_gid() == "line end"]:
        text.remove()  # an earlier call on the same axes
    lines = _labelled(ax)
    if not lines:
        return
    ax.autoscale_view()
    to_axes = ax.transData + ax.transAxes.inverted()
    heights = [to_axes.transform((line.get_xdata()[-1], line.get_ydata()[-1]))[1] for line in lines]
    gap = 13 / (ax.get_window_extent().height * 72 / ax.figure.dpi)  # a line of text
    order = np.argsort(heights)
    placed = np.array(heights)[order]
    for _ in range(50):  # push neighbours apart until all have room
        for low in range(len(placed) - 1):
            short = gap - (placed[low + 1] - placed[low])
            if short > 1e-9:
                placed[low] -= short / 2
                placed[low + 1] += short / 2
    for height, index in zip(placed, order, strict=True):
        ax.annotate(lines[index].get_label(), (1.015, height), xycoords=ax.transAxes, va="center",
                    ha="left", color=lines[index].get_color(), fontsize=9.5, gid="line end",
                    annotation_clip=False)
