"""Charts as PDF and SVG, and tables for LaTeX: what they hold, and how it is drawn."""

import json
import re
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from eval_samples import made_model
from made_runs import HARM, make_evaluation, make_run
from rows import write_rows

from megatron_opsft.commands.evaluate.comparison import compare
from megatron_opsft.commands.evaluate.results import build_results, read_results
from megatron_opsft.commands.report.chart import Bars, Chart, Picture, Series, describe
from megatron_opsft.commands.report.curves import curves_of
from megatron_opsft.commands.report.figures import name_pictures, write_figures
from megatron_opsft.commands.report.latex import escape_latex, write_latex
from megatron_opsft.commands.report.page import write_page
from megatron_opsft.commands.report.page_sections import PageSection, plots_of_block
from megatron_opsft.commands.report.paper import WIDTH, draw, shorten, text_width
from megatron_opsft.commands.report.plot import place
from megatron_opsft.commands.report.runs import read_run
from megatron_opsft.commands.report.table import (
    Estimate,
    MeanOverSeeds,
    Size,
    Table,
    TableRow,
)
from megatron_opsft.runtime.formatting import percent

HOSTILE = "50%_of & #1 {a}^~\\x $\\frac$ | <b> ± → \x00\u2028 --"


def curve(*points: tuple[float, float], **changes: Any) -> Chart:
    series = Series(label="", style_index=0, points=points)
    return replace(Chart(name="c", title="C", y="c", series=[series]), **changes)


def texts_of(svg: bytes) -> str:
    """Texts as they are drawn, one space between them."""
    found = re.findall(r"<text [^>]*>(.*?)</text>", svg.decode(), re.DOTALL)
    return " ".join(" ".join(re.sub("<[^>]*>", " ", each) for each in found).split())


def numbers_in(table: str) -> list[str]:
    return re.findall(r"\d[\d,.]*", table)


def rows_of(tex: str) -> list[list[str]]:
    """The cells of every line that has some."""
    lines = [line.removesuffix(r" \\") for line in tex.splitlines() if line.endswith(r" \\")]
    return [re.split(r"(?<!\\) & ", line) for line in lines]


def pictures_of(run: Path) -> dict[str, Picture]:
    top, others = curves_of([read_run(run, "run")])
    return name_pictures([PageSection(title="", text="", plots=[*top, *others])])


def test_a_chart_of_a_run_has_its_points_and_what_they_rest_on(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line, count in zip(lines, (12, 12, 16), strict=True):
        line["num_rollouts"] = count
    write_rows(run / "metrics.jsonl", lines)
    evaluations = [json.loads(line) for line in (run / "evals.jsonl").read_text().splitlines()]
    write_rows(run / "evals.jsonl", [line | {"eval_samples": 512} for line in evaluations])
    pictures = pictures_of(run)
    accuracy, loss = pictures["accuracy"], pictures["loss"]
    assert isinstance(accuracy, Chart) and isinstance(loss, Chart)
    trained, held = accuracy.series
    assert [y for _, y in trained.points] == pytest.approx([0.4, 0.5, 0.6])
    assert held.points == [(0, 0.5), (3, 0.75)] and held.kind == "held"
    assert trained.n == "12–16 responses in each of 3 steps"
    assert loss.note == "n = 70 trained tokens in each of 2 steps"  # one is NaN
    assert pictures["lr" if "lr" in pictures else "seconds"].note == "n = 3 steps"
    assert {"mean_response_tokens", "eval_hard_accuracy", "seconds"} <= pictures.keys()
    text = texts_of(draw(accuracy)["svg"])
    assert "n = 12–16 responses in each of 3 steps (training rollouts); n = 512 responses" in text
    assert "accuracy (%)" in text and "held-out problems" in text and " 60 " in f" {text} "
    # The page draws the same description.
    write_page(tmp_path / "page.html", [run])
    assert accuracy.note in (tmp_path / "page.html").read_text(encoding="utf-8")


def evaluations_in(directory: Path, *names: str) -> list[Path]:
    """Of 10 problems and 2 responses each."""
    tokens = range(300, 0, -100)
    return [
        make_evaluation(directory / f"eval{n}", name, tokens[n], 6 + n)
        for n, name in enumerate(names)
    ]


def test_charts_of_evaluations_have_the_stored_intervals(tmp_path: Path) -> None:
    results = [read_results(path) for path in evaluations_in(tmp_path, "long", "short")]
    comparison = compare(results)
    pictures = name_pictures(comparison.sections())
    budgets = [f"{name}_at_budget" for name in ("accuracy", "mean_tokens", "norm_std")]
    assert [*pictures] == ["lengths", "accuracy_length", *budgets]
    metrics = results[1].benchmarks["gsm8k"].metrics
    length, accuracy = metrics["mean_tokens"], metrics["accuracy"]
    scatter, bars, at_budget = (
        pictures[name] for name in ("accuracy_length", "lengths", "accuracy_at_budget")
    )
    assert isinstance(scatter, Chart) and isinstance(bars, Bars) and isinstance(at_budget, Chart)
    short = scatter.series[1]
    assert short.points == [(length.value, accuracy.value)]
    assert short.whiskers == [
        ((length.value, length.value), (accuracy.low, accuracy.high), "_"),
        ((length.low, length.high), (accuracy.value, accuracy.value), "|"),
    ]
    assert bars.rows[1].interval == (length.low, length.high)
    budgeted = results[1].benchmarks["gsm8k"].budgets[1].metrics["accuracy"]
    interval = budgeted.low, budgeted.high
    assert at_budget.series[1].whiskers[1] == ((128, 128), interval, "_")
    note = "n = 10 problems × 2 responses; whiskers: 95 % intervals, bootstrap over problems"
    for picture in pictures.values():
        assert picture.note == note
        assert note in texts_of(draw(picture)["svg"])
    # The page has these whiskers, too.
    assert [len(series.whiskers) for series in place(scatter).series] == [2, 2]
    assert len(place(bars).bars[1].whisker) == 2


def test_several_seeds_have_their_deviation_for_whiskers() -> None:
    estimate = Estimate(value=0.5, low=0.4, high=0.6)
    metrics = {
        "mean_tokens": MeanOverSeeds(value=100.0, deviation=5.0),
        "accuracy": MeanOverSeeds(value=0.5, deviation=0.1),
    }
    size = {"overall": Size(problems=1024, samples=[4, 16])}
    at_budgets = [(n, {"accuracy": MeanOverSeeds(value=0.5, deviation=0.2)}) for n in (16, 32)]
    several = TableRow(
        label="ours",
        blocks={"overall": metrics},
        budgets={"overall": at_budgets},
        sizes=size,
        seeds=3,
    )
    alone = {"mean_tokens": Estimate(value=100.0), "accuracy": estimate}
    one = TableRow(label="base", blocks={"overall": alone}, sizes=size)
    bars, scatter, at_budget = plots_of_block([one, several], "overall")
    assert isinstance(bars, Bars) and isinstance(scatter, Chart) and isinstance(at_budget, Chart)
    assert [row.interval for row in bars.rows] == [None, (95.0, 105.0)]
    assert scatter.series[1].whiskers == [
        ((100.0, 100.0), (0.4, 0.6), "_"),
        ((95.0, 105.0), (0.5, 0.5), "|"),
    ]
    assert at_budget.series[0].whiskers == [((n, n), (0.3, 0.7), "_") for n in (16, 32)]
    assert scatter.note == (
        "n = 1,024 problems × 4–16 responses (base); n = 1,024 problems × 4–16 responses × 3 seeds"
        " (ours); whiskers: 95 % intervals, bootstrap over problems (base); standard deviation"
        " over seeds (ours)"
    )


def test_a_note_names_whom_it_holds_for_where_that_is_not_all() -> None:
    assert describe([("a", "3 steps", ""), ("b", "3 steps", "")], "more") == "n = 3 steps; more"
    many = [(name, "9 steps", "") for name in "abcdef"]
    assert describe([*many, ("g", "7 steps", "")]) == (
        "n = 9 steps (a, b, c and 3 more); n = 7 steps (g)"
    )
    assert describe([("a", "", "")]) == ""


def test_a_pdf_is_one_page_of_a_column_with_its_fonts(tmp_path: Path) -> None:
    for name, picture in pictures_of(make_run(tmp_path / "run")).items():
        pdf = draw(picture)["pdf"]
        assert pdf.startswith(b"%PDF-") and pdf.rstrip().endswith(b"%%EOF")
        assert pdf.count(b"/Type /Page\n") + pdf.count(b"/Type /Page ") == 1
        (box,) = re.findall(rb"/MediaBox \[ ?([\d. ]+)\]", pdf)
        width = float(box.split()[2])
        assert width == pytest.approx(72 * WIDTH)
        assert b"/FontFile2" in pdf and b"/Type3" not in pdf, name
        drawn = b"".join(zlib.decompress(each) for each in streams_in(pdf))
        assert drawn.count(b" m\n") > 3  # lines, not an image
        assert b"/Subtype /Image" not in pdf


def streams_in(pdf: bytes) -> list[bytes]:
    """What is packed in it."""
    found = re.findall(rb"/Filter /FlateDecode.*?stream\r?\n(.*?)\r?\nendstream", pdf, re.DOTALL)
    assert found
    return found


def test_the_same_chart_has_the_same_bytes_and_no_date(tmp_path: Path) -> None:
    pictures = pictures_of(make_run(tmp_path / "run")).values()
    for first, second in zip(map(draw, pictures), map(draw, pictures), strict=True):
        assert first == second
        assert b"CreationDate" not in first["pdf"] and b"dc:date" not in first["svg"]


def test_texts_that_mean_harm_are_drawn_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    """A dollar is no formula, and a name that begins with _ is in the legend."""
    labels = [HOSTILE, "_hidden", HARM[:40] + "\udc9f", "模型"]
    series = [
        Series(label=label, style_index=n, points=[(1, n), (2, n)], n=label)
        for n, label in enumerate(labels)
    ]
    svg = draw(curve(series=series))["svg"]
    text = texts_of(svg)
    assert "50%_of &amp; #1 {a}^~\\x $\\frac$ | &lt;b&gt; ± → ?" in text
    assert "_hidden" in text and "模型" in text and b"<script" not in svg
    assert caplog.messages == ["c: the PDF has boxes for signs that DejaVu Sans lacks"]
    rows = [TableRow(label=label, blocks=one_block()) for label in labels]
    (bars, *_) = plots_of_block(rows, "overall")
    assert "_hidden" in texts_of(draw(bars)["svg"])


def one_block() -> dict[str, dict[str, Estimate]]:
    return {"overall": {"mean_tokens": Estimate(value=9.0), "accuracy": Estimate(value=1.0)}}


def test_long_names_lose_their_middle_and_keep_both_ends() -> None:
    short = shorten("a-model-with-a-long-name/" * 4 + "step_7", 7, 100)
    assert short.startswith("a-model") and "…" in short and short.endswith("step_7")
    assert text_width(short, 7) <= 100 < text_width(short + "mmm", 7)
    assert shorten("brief", 7, 100) == "brief"


@pytest.mark.parametrize(
    ("points", "changes", "ticks"),
    [
        ([(0, 0.15), (24, 1.0)], {"show": percent}, ["25 %", "50 %", "75 %", "100 %"]),
        ([(0, 0), (24, 6800)], {"from_zero": True}, ["0", "2,000", "4,000", "6,000"]),
        ([(0, 1.0), (24, 1.0)], {"show": percent}, ["90 %", "92.5 %", "95 %", "97.5 %", "100 %"]),
    ],
)
def test_numbers_on_an_axis_are_round_and_inside(
    points: list[tuple[float, float]], changes: dict[str, Any], ticks: list[str]
) -> None:
    axes = curve(*points, **changes).axes()
    assert [*axes.y_ticks.values()] == ticks
    low, high = axes.y
    assert all(low <= at <= high for at in axes.y_ticks)
    assert [*axes.x_ticks.values()] == ["0", "5", "10", "15", "20"]


def test_names_are_plain_and_told_apart() -> None:
    def section(name: str, *charts: str) -> PageSection:
        plots = [curve((1, 1), name=chart) for chart in charts]
        return PageSection(title="", text="", plots=plots, name=name)

    found = name_pictures([section("", "a/b c", "x_y"), section("Y", "x"), section("../..", "x")])
    assert [*found] == ["a_b_c", "x_y", "x_Y_2", "x"]


def test_latex_escapes_what_it_would_read_as_its_own() -> None:
    assert escape_latex(HOSTILE) == (
        r"50\%\_of \& \#1 \{a\}\textasciicircum{}\textasciitilde{}\textbackslash{}x "
        r"\$\textbackslash{}frac\$ \textbar{} \textless{}b\textgreater{} $\pm$ $\rightarrow$ ?"
        r" -{}-"
    )
    assert escape_latex("-84.8 % [-1, 2] a-7") == r"$-$84.8 \% [$-$1, 2] a-7"
    table = Table(
        caption=f"{HOSTILE}\n\\input{{x}}",
        headings=["Method", "Acc↑"],
        rows=[["[v2]", "1"], ["*", HOSTILE]],
        note="n = 7\n" * 40,
    )
    tex = write_latex([table])
    assert r"{}[v2] & 1 \\" in tex and r"{}* & 50\%\_of \& " in tex
    assert r"Method & Acc$\uparrow$ \\" in tex
    body = tex[tex.index(r"\begin{tabular}") :]
    assert all(line.startswith("%") for line in tex[: -len(body)].splitlines() if line)
    bare = re.sub(r"\\[{}\\]", "", body)
    assert bare.count("{") == bare.count("}")
    assert {len(row) for row in rows_of(body)} == {2}


def test_both_tables_hold_the_numbers_of_the_evaluation_s_own(tmp_path: Path) -> None:
    """Of two benchmarks and their mean: a group of rows each."""
    models = (("a_model", 300, 6), ("other", 100, 7))
    results = [
        build_results(*made_model(*model, benchmarks=("gsm8k", "aime24")), budgets=())
        for model in models
    ]
    comparison = compare(results)
    sections = name_pictures(comparison.sections())
    assert {"lengths_gsm8k", "lengths_aime24", "accuracy_length_overall"} <= sections.keys()
    write_figures(tmp_path, {}, [comparison.paper_table()])
    tex, markdown = ((tmp_path / f"table.{ending}").read_text() for ending in ("tex", "md"))
    assert [line for line in tex.splitlines() if line.endswith("rule")] == (
        [r"\toprule", *[r"\midrule"] * 3, r"\bottomrule"]
    )
    rows = rows_of(tex)
    names = [row[:2] for row in rows]
    assert names[:3] == [["Benchmark", "Method"], ["GSM8K", r"a\_model"], ["", "other"]]
    assert len(rows) == 7 and len({len(row) for row in rows}) == 1
    in_tex = [numbers_in(" ".join(row[2:])) for row in rows[1:]]
    lines = [line.split("|")[3:] for line in markdown.splitlines() if line.startswith("|")][2:]
    assert in_tex == [numbers_in(" ".join(line)) for line in lines]
    # A line of the evaluation's own table has all benchmarks, and fewer columns of each.
    own = [line for line in comparison.markdown().splitlines() if line.startswith("|")][2:]
    for model, line in enumerate(own):
        columns = numbers_in(line.split("|", 2)[2])
        share = len(columns) // 3
        for block in range(3):
            wanted = columns[block * share : (block + 1) * share]
            assert in_tex[2 * block + model][:share] == wanted and share > 10
    assert r"60.0 {\scriptsize [" in tex and r"\textbf{70.0} {\scriptsize [" in tex
    note = " ".join(line.removeprefix("% ") for line in tex.splitlines() if line[:1] == "%")
    assert "In brackets: 95 % intervals, bootstrap over problems." in note
    assert "GSM8K: 10 problems, N = 2" in note
