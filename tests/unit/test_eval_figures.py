"""Figures of an evaluation: files, their bytes, and what is drawn in them."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_opsft.errors import UserError
from megatron_opsft.report.estimate import Estimate
from megatron_opsft.report.evaluation import (
    BudgetCurve,
    ScatterPoint,
    pareto_front,
    plot_accuracy_length,
    plot_budgets,
)


def value(number: float, low: float | None = None, high: float | None = None) -> Estimate:
    return Estimate(value=number, low=low, high=high)


def point(label: str, tokens: Estimate, accuracy: Estimate) -> ScatterPoint:
    return ScatterPoint(label=label, tokens=tokens, accuracy=accuracy)


POINTS = [
    point("R1 & friends", value(10178, 9800, 10500), value(0.59, 0.57, 0.61)),
    point("On-Policy_SFT", value(2186, 2100, 2300), value(0.599, 0.58, 0.62)),
    point("no interval", value(900), value(0.2)),
]
CURVES = [
    BudgetCurve(
        label=f"model {m}",
        budgets=(100, 1024, 32768),
        accuracy=(value(0.1, 0.05, 0.15), value(0.4, 0.3, 0.5), value(0.6, 0.5, 0.7)),
        tokens=(value(99, 98, 100), value(900, 800, 1000), value(5000 * m, 5000, 9000)),
        norm_std=(value(0.01), value(0.1), value(0.4)),
    )
    for m in (1, 2)
]


def svg_text(path: Path) -> str:
    """Glyphs are drawn as shapes; matplotlib keeps each text in a comment."""
    return path.read_text(encoding="utf-8")


def test_files_are_the_same_bytes_each_time(tmp_path: Path) -> None:
    for name in ("first", "second"):
        directory = tmp_path / name
        plot_accuracy_length(POINTS, [directory / f"scatter.{s}" for s in ("png", "svg", "pdf")])
        plot_budgets(CURVES, [directory / f"budgets.{s}" for s in ("png", "svg", "pdf")])
    files = sorted(path.name for path in (tmp_path / "first").iterdir())
    assert len(files) == 6
    for file in files:
        content = (tmp_path / "first" / file).read_bytes()
        assert content == (tmp_path / "second" / file).read_bytes()
        assert len(content) > 10_000
    assert (tmp_path / "first" / "scatter.png").read_bytes()[:4] == b"\x89PNG"


def test_scatter_names_models_axes_and_front(tmp_path: Path) -> None:
    plot_accuracy_length(POINTS, [tmp_path / "a.svg"], title="AIME24")
    text = svg_text(tmp_path / "a.svg")
    for word in ("R1 &amp; friends", "On-Policy_SFT", "Pareto front", "accuracy (%)", "AIME24"):
        assert f"<!-- {word} -->" in text, word
    plot_accuracy_length(POINTS[:1], [tmp_path / "b.svg"])
    assert "Pareto front" not in svg_text(tmp_path / "b.svg")


def test_budget_curves_name_budgets_and_panels(tmp_path: Path) -> None:
    plot_budgets(CURVES, [tmp_path / "a.svg"], title="Overall")
    text = svg_text(tmp_path / "a.svg")
    for word in ("100", "1k", "32k", "model 1", "model 2", "NormStd of lengths", "token budget"):
        assert f"<!-- {word} -->" in text, word


def test_budgets_too_close_for_two_labels_keep_the_larger(tmp_path: Path) -> None:
    close = [replace(CURVES[0], budgets=(128, 256, 350))]
    plot_budgets(close, [tmp_path / "a.svg"])
    text = svg_text(tmp_path / "a.svg")
    assert "<!-- 350 -->" in text and "<!-- 128 -->" in text and "<!-- 256 -->" not in text


def test_a_figure_shows_its_numbers(tmp_path: Path) -> None:
    """Another number is another figure."""
    plot_budgets(CURVES, [tmp_path / "a.svg"])
    plot_budgets([CURVES[0], CURVES[0]], [tmp_path / "b.svg"])
    assert (tmp_path / "a.svg").read_bytes() != (tmp_path / "b.svg").read_bytes()


def test_many_models_keep_marks_of_their_own(tmp_path: Path) -> None:
    points = [point(f"m{n}", value(100 + n), value(0.5)) for n in range(14)]
    plot_accuracy_length(points, [tmp_path / "a.svg"])
    assert "<!-- m13 -->" in svg_text(tmp_path / "a.svg")


@pytest.mark.parametrize(("shortest", "panels"), [(20, 2), (90, 1)])
def test_models_that_hide_each_other_get_a_panel_of_their_own(
    tmp_path: Path, shortest: int, panels: int
) -> None:
    crowd = [point(f"m{n}", value(shortest + n), value(0.99)) for n in range(7)]
    plot_accuracy_length([*crowd, point("base", value(120), value(1.0))], [tmp_path / "a.svg"])
    assert svg_text(tmp_path / "a.svg").count("<!-- mean response tokens -->") == panels


@pytest.mark.parametrize(
    ("label", "drawn"),
    [
        ("costs $5 or $6", "costs $5 or $6"),
        ("$\\frac$", "$\\frac$"),
        ("one \\$ and $", "one \\$ and $"),
        ("_hidden", " _hidden"),
        ("two\nlines", "two lines"),
    ],
)
def test_any_name_of_a_model_is_drawn_as_it_is(tmp_path: Path, label: str, drawn: str) -> None:
    """Dollars are no mathematics, and no name is left out of the legend."""
    points, curves = [replace(POINTS[0], label=label)], [replace(CURVES[0], label=label)]
    plot_accuracy_length(points, [tmp_path / "scatter.svg"], title=label)
    plot_budgets(curves, [tmp_path / "budgets.svg"], title=label)
    for name in ("scatter", "budgets"):
        assert svg_text(tmp_path / f"{name}.svg").count(f"<!-- {drawn} -->") == 2, name


def test_bad_input_is_named(tmp_path: Path) -> None:
    for plot, data in ((plot_accuracy_length, POINTS), (plot_budgets, CURVES)):
        with pytest.raises(UserError, match=r"a\.bmp: the suffix must be one of"):
            plot(data, [tmp_path / "a.png", tmp_path / "a.bmp"])  # type: ignore[operator]
        with pytest.raises(UserError, match="no model to draw"):
            plot([], [tmp_path / "a.png"])  # type: ignore[operator]
    assert list(tmp_path.iterdir()) == []


def test_pareto_front_matches_its_definition() -> None:
    points = [(100, 0.5), (200, 0.6), (150, 0.5), (200, 0.6), (300, 0.6), (50, 0.1), (90, 0.05)]
    assert pareto_front(points) == {0, 1, 3, 5}
    assert pareto_front([(1, 1)]) == {0}
