"""companion.plots: what is drawn, that every letter has a glyph, the same bytes each time."""

import io
import warnings

import numpy as np
import pandas as pd
import pytest

from companion import plots

SYMBOLS = "方策・報酬・重要度比「好まれた」（参照方策）〜：、。 ≤ ≥ ∑ π β σ Δ ε λ θ − × → ∈ √ ½ ∞ ‖"


def png(figure):
    """The picture's bytes; a letter without a glyph is an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Glyph .* missing")
        written = io.BytesIO()
        figure.savefig(written, format="png", metadata=plots.METADATA)
    return written.getvalue()


@pytest.fixture
def history():
    steps = np.arange(1, 11)
    return pd.DataFrame({
        "step": steps * 5,
        "loss": np.exp(-steps / 5),
        "logps/chosen": -steps * 0.1,
        "logps/rejected": np.where(steps % 2, -steps * 1.0, np.nan),
        "empty": np.nan,
    })


def texts(figure):
    return [text.get_text() for ax in figure.axes for text in ax.texts]


def test_every_letter_has_a_glyph():
    figure, axes = plots.figure()
    axes[0, 0].set_title(SYMBOLS)
    axes[0, 0].set_xlabel(r"$\pi^*$ と $\beta\,\sum_t r_t$")
    axes[0, 0].plot([-3, 2], [-1, 1])
    png(figure)


def test_a_missing_glyph_would_be_noticed():
    figure, axes = plots.figure()
    axes[0, 0].set_title("\U0001fae8")
    with pytest.raises(UserWarning, match="Glyph"):
        png(figure)


def test_curves_draw_each_column_against_the_step(history):
    figure = plots.curves(history, {
        "損失": "loss",
        "対数確率": {"好まれた": "logps/chosen", "好まれなかった": "logps/rejected"},
    })  # fmt: skip
    loss, logps = figure.axes
    assert loss.get_title("left") == "損失" and loss.get_xlabel() == "更新回数"
    np.testing.assert_array_equal(loss.lines[0].get_xdata(), history["step"])
    np.testing.assert_array_equal(loss.lines[0].get_ydata(), history["loss"])
    np.testing.assert_array_equal(logps.lines[1].get_xdata(), [5, 15, 25, 35, 45])
    assert sorted(texts(figure)) == ["好まれた", "好まれなかった"]
    png(figure)


def test_curves_take_a_dict_and_count_rows_without_a_step():
    figure = plots.curves({"kl": [3.0, 2.0, 1.0]}, {"KL": "kl"})
    np.testing.assert_array_equal(figure.axes[0].lines[0].get_xdata(), [1, 2, 3])


def test_curves_take_another_column_across(history):
    figure = plots.curves(history, {"対数確率": "logps/chosen"}, x="loss", xlabel="損失")
    np.testing.assert_array_equal(figure.axes[0].lines[0].get_xdata(), history["loss"])
    assert figure.axes[0].get_xlabel() == "損失"


def test_four_panels_stand_two_by_two(history):
    figure = plots.curves(history, dict.fromkeys("abcd", "loss"))
    assert figure.axes[0].get_gridspec().get_geometry() == (2, 2)
    five = plots.curves(history, dict.fromkeys("abcde", "loss"))
    assert [ax.axison for ax in five.axes] == [True] * 5 + [False]


@pytest.mark.parametrize("panels, message", [
    ({"a": "los"}, "'los' is not in the history, which has: step, loss"),
    ({"a": "empty"}, "'empty' has no value"),
    ({}, "panels is empty"),
])  # fmt: skip
def test_curves_refuse_what_they_cannot_draw(history, panels, message):
    with pytest.raises(ValueError, match=message):
        plots.curves(history, panels)


def test_spread_draws_median_and_range():
    ys = np.array([[1.0, 5.0], [2.0, 4.0], [9.0, 3.0]])
    figure = plots.spread([0, 1], ys, "DPO", title="題", xlabel="横", ylabel="縦", yscale="log")
    (ax,) = figure.axes
    assert (ax.get_title("left"), ax.get_xlabel(), ax.get_ylabel()) == ("題", "横", "縦")
    assert ax.get_yscale() == "log"
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), [2.0, 4.0])
    band = ax.collections[0].get_paths()[0].vertices
    assert (band[:, 1].min(), band[:, 1].max()) == (1.0, 9.0)
    assert texts(figure) == ["DPO"]


def test_spread_over_the_same_axes_takes_the_next_colour():
    _, axes = plots.figure()
    for label in ("一", "二"):
        figure = plots.spread([0, 1], np.ones((2, 2)), label, ax=axes[0, 0])
    assert [line.get_color() for line in axes[0, 0].lines] == list(plots.COLOURS[:2])
    assert sorted(texts(figure)) == ["一", "二"]


def test_a_rule_across_the_panel_takes_no_colour():
    _, axes = plots.figure()
    axes[0, 0].axhline(0)
    plots.spread([0, 1], np.ones((2, 2)), "一", ax=axes[0, 0])
    assert axes[0, 0].lines[1].get_color() == plots.COLOURS[0]


def test_labels_of_lines_that_end_together_do_not_overlap():
    figure = plots.spread([0, 1], {name: np.ones((2, 2)) for name in "あいう"})
    png(figure)
    boxes = sorted((text.get_window_extent() for text in figure.axes[0].texts),
                   key=lambda box: box.y0)
    assert all(low.y1 <= high.y0 + 1 for low, high in zip(boxes, boxes[1:], strict=False))


@pytest.mark.parametrize("ys, message", [
    (np.ones(3), r"ys must be \(seeds, 3\), not \(3,\)"),
    ({"a": np.ones((2, 4))}, r"ys\['a'\] must be"),
    ([[0.0, 1.0, np.nan]], "NaN at seed 0, position 2"),
])  # fmt: skip
def test_spread_refuses_what_it_cannot_draw(ys, message):
    with pytest.raises(ValueError, match=message):
        plots.spread([0, 1, 2], ys)


def test_before_after_shows_both_numbers():
    figure = plots.before_after({"正解率": (0.38, 0.81), "下がる": (0.6, 0.2)}, limits=(0, 1))
    assert texts(figure) == ["0.38", "学習前", "0.81", "学習後", "0.60", "0.20"]
    (ax,) = figure.axes
    assert [label.get_text() for label in ax.get_yticklabels()] == ["正解率", "下がる"]
    assert ax.get_xlim() == (0, 1)
    dots = [line for line in ax.lines if line.get_marker() == "o"]
    assert len(dots) == 4 and not any(dot.get_clip_on() for dot in dots)  # whole at 0 and 1 too
    png(figure)


@pytest.mark.parametrize("measures, message", [
    ({}, "measures is empty"),
    ({"a": (1.0, float("nan"))}, r"measures\['a'\]"),
    ({"a": (1.0,)}, r"measures\['a'\]"),
])  # fmt: skip
def test_before_after_refuses_what_it_cannot_draw(measures, message):
    with pytest.raises(ValueError, match=message):
        plots.before_after(measures)


def test_the_same_figure_is_the_same_bytes(history):
    def once():
        return png(plots.curves(history, {"損失": "loss"}))

    assert once() == once()
    assert b"Software" not in once()
