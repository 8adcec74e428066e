"""Charts as figures for papers: vector graphics, one column wide. The same chart always gives the
same bytes.

Colours are those of Okabe and Ito, which colour-blind people tell apart; in black and white, line
styles and markers still differ. The PDF contains its fonts (Type 42); text in the SVG stays text.
The legend and the note on n and whiskers stand below the axes, so that they cover no data.
"""

import io
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.style
from matplotlib.artist import Artist
from matplotlib.axes import Axes as Canvas
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.textpath import text_to_path
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from megatron_opsft.commands.report.chart import (
    CLOUD_WIDTH,
    Bars,
    Chart,
    Cloud,
    Picture,
    Series,
)
from megatron_opsft.commands.report.table import plain_text
from megatron_opsft.errors import log

WIDTH = 3.3  # inches: one column of most papers
_POINTS = 72.0  # in an inch
_AXES_HEIGHT = 1.75  # inches, with the numbers of the axes
_BAR_HEIGHT = 0.165  # inches, with the gap to the next bar
_FONT, _LEGEND_FONT, _NOTE_FONT = 7.5, 7.0, 6.0  # sizes in points
_EDGE = 0.03  # inches around the picture
_MAX_MARKED = 20  # a longer curve has markers only at some points:
_NUM_MARKERS = 8  # about so many
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_WORD_COLOURS = ("#0072B2", "#B34700", "#00664A", "#000000")  # dark enough to be read
_DASHES = (
    "-",
    "--",
    "-.",
    (0, (1, 1)),
    (0, (5, 1, 1, 1, 1, 1)),
    (0, (8, 2)),
    (0, (3, 3)),
)
_MARKERS = "os^DvPX"
_STYLES = list(zip(_COLOURS, _MARKERS, _DASHES, strict=True))
# Settings of matplotlib by `Series.kind`.
_STYLES_OF_KIND: Mapping[str, Mapping[str, Any]] = {
    "curve": {"markersize": 3.0},
    "held": {"markersize": 4.0, "linestyle": ":", "markerfacecolor": "white"},
    "points": {"markersize": 5.0, "linestyle": ""},
}
_FAMILY = "DejaVu Sans"  # comes with matplotlib, so it is the same everywhere
_STYLE = {
    "font.family": _FAMILY,
    "font.size": _FONT,
    "xtick.labelsize": _LEGEND_FONT,
    "ytick.labelsize": _LEGEND_FONT,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.2,
    "text.parse_math": False,  # $ is just a dollar sign
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
    "svg.hashsalt": "megatron-opsft",
}
# Dates and versions, which would change although the chart did not.
_OMITTED_METADATA = {
    "pdf": ("CreationDate", "Creator", "Producer"),
    "svg": ("Date", "Creator"),
}


def draw(picture: Picture) -> dict[str, bytes]:
    """Draw a picture. Returns ending of the file name -> contents of the file: pdf and svg.

    A character that the font lacks is a box in the PDF; a warning is logged.
    """
    files = {}
    with (
        matplotlib.style.context(["default", _STYLE]),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.filterwarnings("always", "Glyph .* missing from")
        if isinstance(picture, Cloud):
            figure = _draw_cloud(picture)
        elif isinstance(picture, Bars):
            figure = _draw_bars(picture)
        else:
            figure = _draw_chart(picture)
        title = plain_text(picture.title)
        for ending, omitted in _OMITTED_METADATA.items():
            metadata = {"Title": title, **dict.fromkeys(omitted)}
            data = io.BytesIO()
            figure.savefig(data, format=ending, metadata=metadata)
            files[ending] = data.getvalue()
    if any(str(warning.message).startswith("Glyph") for warning in caught):
        log.warning(
            "%s: the PDF has boxes for signs that %s lacks", picture.name, _FAMILY
        )
    return files


def shorten(text: str, size: float, room: float) -> str:
    """Return the text with so much of its middle left out that it is at most `room` points wide.

    size: the font's, in points.
    """
    text = plain_text(text)
    short = text
    length = len(text)
    while text_width(short, size) > room and length > 2:
        length -= 1
        short = f"{text[: math.ceil(length / 2)]}…{text[-(length // 2) :]}"
    return short


def text_width(text: str, size: float) -> float:
    """Return the width of a text in points. size: the font's, in points."""
    font = FontProperties(family=_FAMILY, size=size)
    width, _, _ = text_to_path.get_text_width_height_descent(text, font, ismath=False)
    return float(width)


def _widest(texts: Sequence[str], size: float) -> float:
    return max((text_width(text, size) for text in texts), default=0.0)


def _draw_chart(chart: Chart) -> Figure:
    axes = chart.axes()
    legend: list[tuple[Artist, str]] = []
    for series in chart.series:
        if series.label:
            legend.append((Line2D([], [], **_line_style(series)), series.label))
    figure, canvas = _new_figure(_AXES_HEIGHT, chart.note, legend)
    for series in chart.series:
        _draw_series(canvas, chart, series)
    canvas.set(xlim=axes.x, ylim=axes.y, xlabel=plain_text(chart.x))
    canvas.set_xticks(list(axes.x_ticks), list(axes.x_ticks.values()))
    y_label = chart.y
    numbers = list(axes.y_ticks.values())
    if all(text.endswith("%") for text in numbers):
        y_label = f"{chart.y} (%)"
        numbers = [text.rstrip("% ") for text in numbers]
    canvas.set_yticks(list(axes.y_ticks), numbers)
    lines = _wrap(y_label, _FONT, _POINTS * 0.8 * _AXES_HEIGHT)
    canvas.set_ylabel("\n".join(lines))
    canvas.grid(axis="y", color="#dddddd", linewidth=0.5)
    return figure


def _draw_series(canvas: Canvas, chart: Chart, series: Series) -> None:
    points = series.thinned()
    style = _line_style(series)
    marked_every = 1
    if series.kind == "curve" and len(points) > _MAX_MARKED:
        marked_every = math.ceil(len(points) / _NUM_MARKERS)
    canvas.plot(
        [chart.along(x) for x, _ in points],
        [y for _, y in points],
        markevery=marked_every,
        clip_on=False,
        **style,
    )
    for whisker in series.whiskers:
        canvas.plot(
            [chart.along(x) for x in whisker.x],
            whisker.y,
            color=style["color"],
            marker=whisker.cap,
            markersize=4,
            linewidth=0.8,
            clip_on=False,
        )


def _line_style(series: Series) -> dict[str, Any]:
    """Return matplotlib's settings of a series' line and markers."""
    colour, marker, dashes = _STYLES[series.style_index % len(_STYLES)]
    style = {"color": colour, "marker": marker, "linestyle": dashes}
    return {**style, **_STYLES_OF_KIND[series.kind]}


def _draw_bars(chart: Bars) -> Figure:
    """Draw one bar for each row, in its parts if it has some, with its text at the end."""
    legend: list[tuple[Artist, str]] = []
    for name, colour in zip(chart.parts, _COLOURS, strict=False):
        legend.append((Patch(color=colour), name))
    height = _BAR_HEIGHT * len(chart.rows) + 0.45
    figure, canvas = _new_figure(height, chart.note, legend)
    levels = range(len(chart.rows))
    texts = [plain_text(row.text) for row in chart.rows]
    for level, row in zip(levels, chart.rows, strict=True):
        begin = 0.0
        for length, colour in zip(row.parts, _COLOURS, strict=False):
            canvas.barh(level, length, left=begin, height=0.62, color=colour)
            begin += length
        if not row.parts:
            canvas.barh(level, row.value, height=0.62, color="#7FB8D8")
    for level, row, text in zip(levels, chart.rows, texts, strict=True):
        if row.interval:
            canvas.plot(
                row.interval,
                [level, level],
                color="black",
                marker="|",
                markersize=4,
                linewidth=0.8,
            )
        canvas.annotate(
            text,
            (row.end, level),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=_NOTE_FONT,
        )
    max_label_width = 0.4 * WIDTH * _POINTS
    labels = [shorten(row.label, _LEGEND_FONT, max_label_width) for row in chart.rows]
    canvas.set_yticks(levels, labels)
    canvas.tick_params(axis="y", length=0)
    room = WIDTH * _POINTS - _widest(labels, _LEGEND_FONT) - 12
    # Points for the longest bar: what its text leaves, and at least 30 %.
    bar_room = max(room - _widest(texts, _NOTE_FONT) - 8, 0.3 * room)
    canvas.set_xlim(0, chart.longest * room / bar_room)
    canvas.set_ylim(len(chart.rows) - 0.4, -0.6)
    canvas.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    canvas.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    canvas.set_xlabel(plain_text(chart.x))
    return figure


def _draw_cloud(cloud: Cloud) -> Figure:
    unit = WIDTH * _POINTS / CLOUD_WIDTH  # points
    figure, canvas = _new_figure(cloud.height * unit / _POINTS, cloud.note)
    canvas.set_axis_off()
    canvas.set(xlim=(0, CLOUD_WIDTH), ylim=(cloud.height, 0))
    for index, word in enumerate(cloud.words):
        text = plain_text(word.text)
        size = word.size * unit
        size *= min(1.0, (word.room - 4) * unit / max(text_width(text, size), 1e-6))
        colour = _WORD_COLOURS[index % len(_WORD_COLOURS)]
        canvas.text(word.x, word.y, text, fontsize=size, ha="center", color=colour)
    return figure


def _new_figure(
    height: float, note: str, in_legend: Sequence[tuple[Artist, str]] = ()
) -> tuple[Figure, Canvas]:
    """Return a figure, and its empty axes of `height` inches; the legend and the note stand below
    the axes.

    in_legend: lines or patches, with the labels behind them.
    """
    room = (WIDTH - 2 * _EDGE) * _POINTS
    notes = _wrap(note, _NOTE_FONT, room)
    labels = [shorten(label, _LEGEND_FONT, room - 30) for _, label in in_legend]
    label_room = _widest(labels, _LEGEND_FONT)
    columns = max(1, int(room // (30 + label_room)))
    rows = math.ceil(len(labels) / columns)
    note_height = legend_height = 0.0
    if notes:
        note_height = (1.3 * _NOTE_FONT * len(notes) + 2) / _POINTS
    if rows:
        legend_height = (1.4 * _LEGEND_FONT * rows + 5) / _POINTS
    below = note_height + legend_height
    total_height = height + below
    axes_area = (0, below / total_height, 1, height / total_height)
    layout = ConstrainedLayoutEngine(w_pad=_EDGE, h_pad=2 * _EDGE, rect=axes_area)
    figure = Figure(figsize=(WIDTH, total_height), layout=layout)
    figure.text(
        _EDGE / WIDTH,
        (note_height - 1 / _POINTS) / total_height,
        "\n".join(notes),
        fontsize=_NOTE_FONT,
        color="#444444",
        va="top",
        linespacing=1.3,
    )
    if labels:
        legend = figure.legend(
            handles=[handle for handle, _ in in_legend],
            labels=["-"]
            * len(labels),  # matplotlib leaves out labels that begin with _
            loc="upper center",
            bbox_to_anchor=(0.5, below / total_height),
            ncols=columns,
            frameon=False,
            borderpad=0,
            labelspacing=0.4,
            columnspacing=1.0,
            handlelength=2.6,
            fontsize=_LEGEND_FONT,
        )
        legend.set_in_layout(False)
        for text, label in zip(legend.get_texts(), labels, strict=True):
            text.set_text(label)
    return figure, figure.add_subplot()


def _wrap(text: str, size: float, room: float) -> list[str]:
    """Break the text into lines of at most `room` points, unless a word is wider. "n = 7" counts as
    one word.
    """
    lines: list[str] = []
    for word in plain_text(text).replace("n = ", "n\u00a0=\u00a0").split(" "):
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and text_width(longer, size) <= room:
            lines[-1] = longer
        else:
            lines.append(word)
    return [line.replace("\u00a0", " ") for line in lines if line]
