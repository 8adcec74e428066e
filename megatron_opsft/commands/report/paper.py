"""Charts as figures of a paper: one column wide, in vectors, the same bytes for the same chart.

Colours are those of Okabe and Ito, which colour-blind people tell apart; in black and white, line
styles and markers differ too. Fonts are in the PDF (Type 42); text in the SVG stays text. The
legend and the note on n and whiskers stand below the axes, where there is no data.
"""

import io
import logging
import math
import warnings
from collections.abc import Sequence
from typing import Any

import matplotlib.style
from matplotlib.axes import Axes as Canvas
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
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

log = logging.getLogger("megatron_opsft")
WIDTH = 3.3  # inches: one column of most papers
_POINTS = 72.0  # of an inch
_PLOT = 1.75  # inches of height, for axes with their numbers
_BAR = 0.165  # inches of a row of bars
_FONT, _LEGEND, _NOTE = 7.5, 7.0, 6.0  # sizes in points
_EDGE = 0.03  # inches around the picture
_MARKED, _SHORT = (
    8,
    20,
)  # points with a marker on a long curve; a short one has them everywhere
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_WORDS = ("#0072B2", "#B34700", "#00664A", "#000000")  # dark enough to be read
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
_FAMILY = "DejaVu Sans"  # comes with matplotlib: the same everywhere
_STYLE = {
    "font.family": _FAMILY,
    "font.size": _FONT,
    "axes.labelsize": _FONT,
    "xtick.labelsize": _LEGEND,
    "ytick.labelsize": _LEGEND,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.2,
    "text.parse_math": False,  # a $ is a dollar
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
    "svg.hashsalt": "megatron-opsft",
}


def draw(picture: Picture) -> dict[str, bytes]:
    """The picture as files: their ending -> what they hold. A sign that the font lacks is a box in
    the PDF, and is said.
    """
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
        # Neither dates nor versions, which change though the chart does not.
        unsaid = {
            "pdf": ("CreationDate", "Creator", "Producer"),
            "svg": ("Date", "Creator"),
        }
        files = {}
        for ending, keys in unsaid.items():
            data, told = io.BytesIO(), {"Title": plain(picture.title)}
            figure.savefig(
                data, format=ending, metadata={**told, **dict.fromkeys(keys)}
            )
            files[ending] = data.getvalue()
    if any(str(warning.message).startswith("Glyph") for warning in caught):
        log.warning(
            "%s: the PDF has boxes for signs that %s lacks", picture.name, _FAMILY
        )
    return files


def plain(text: str) -> str:
    """The text on one line, of signs that a file can hold."""
    return "".join(
        sign if sign.isprintable() else "?" for sign in " ".join(text.split())
    )


def shorten(text: str, size: float, room: float) -> str:
    """The text, its middle left out where it is wider than `room` points."""
    text = plain(text)
    kept = len(text)
    short = text
    while text_width(short, size) > room and kept > 2:
        kept -= 1
        short = f"{text[: math.ceil(kept / 2)]}…{text[-(kept // 2) :]}"
    return short


def text_width(text: str, size: float) -> float:
    """How wide a text is, in points."""
    font = FontProperties(family=_FAMILY, size=size)
    return float(
        text_to_path.get_text_width_height_descent(text, font, ismath=False)[0]
    )


def _draw_chart(chart: Chart) -> Figure:
    axes = chart.axes()
    named = [one for one in chart.series if one.label]
    figure, canvas = _sheet(_PLOT, chart.note, named)
    for one in chart.series:
        _draw_series(canvas, chart, one)
    canvas.set(xlim=axes.x, ylim=axes.y, xlabel=plain(chart.x))
    canvas.set_xticks(
        [at for at, _ in axes.x_ticks], [text for _, text in axes.x_ticks]
    )
    texts = [text for _, text in axes.y_ticks]
    is_percent = all(text.endswith("%") for text in texts)
    shown = [text.rstrip("% ") if is_percent else text for text in texts]
    canvas.set_yticks([at for at, _ in axes.y_ticks], shown)
    label = _wrapped(
        f"{chart.y} (%)" if is_percent else chart.y, _FONT, _POINTS * 0.8 * _PLOT
    )
    canvas.set_ylabel("\n".join(label))
    canvas.grid(axis="y", color="#dddddd", linewidth=0.5)
    canvas.set_axisbelow(True)
    return figure


def _draw_series(canvas: Canvas, chart: Chart, one: Series) -> None:
    points = one.thinned()
    look = _look(one)
    along, up = [chart.along(x) for x, _ in points], [y for _, y in points]
    is_long = one.kind == "curve" and len(points) > _SHORT
    every = math.ceil(len(points) / _MARKED) if is_long else 1
    canvas.plot(along, up, markevery=every, clip_on=False, **look)
    whisker = {"color": look["color"], "linewidth": 0.8, "clip_on": False}
    for x, *ends in one.intervals:
        canvas.plot([chart.along(x)] * 2, ends, marker="_", markersize=4, **whisker)
    for y, *ends in one.across:
        canvas.plot(
            [chart.along(end) for end in ends],
            [y, y],
            marker="|",
            markersize=4,
            **whisker,
        )


def _look(one: Series) -> dict[str, Any]:
    """Line and marker of a series, in the axes and in the legend."""
    look: dict[str, Any] = {
        "color": _COLOURS[one.place % len(_COLOURS)],
        "marker": _MARKERS[one.place % len(_MARKERS)],
        "markersize": 3.0,
        "linestyle": _DASHES[one.place % len(_DASHES)],
    }
    if one.kind == "held":
        look |= {"linestyle": ":", "markerfacecolor": "white", "markersize": 4.0}
    elif one.kind == "points":
        look |= {"linestyle": "", "markersize": 5.0}
    return look


def _draw_bars(chart: Bars) -> Figure:
    figure, canvas = _sheet(_BAR * len(chart.rows) + 0.45, chart.note, [])
    places = range(len(chart.rows))
    canvas.barh(places, [row.value for row in chart.rows], height=0.62, color="#7FB8D8")
    for place, row in zip(places, chart.rows, strict=True):
        if row.low is not None and row.high is not None:
            ends = [row.low, row.high]
            canvas.plot(
                ends,
                [place] * 2,
                color="black",
                marker="|",
                markersize=4,
                linewidth=0.8,
            )
        canvas.annotate(
            plain(row.text),
            (row.end, place),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=_NOTE,
        )
    labels = [shorten(row.label, _LEGEND, 0.4 * WIDTH * _POINTS) for row in chart.rows]
    canvas.set_yticks(places, labels)
    canvas.tick_params(axis="y", length=0)
    widest = max(
        (text_width(plain(row.text), _NOTE) for row in chart.rows), default=0.0
    )
    label_room = max((text_width(label, _LEGEND) for label in labels), default=0.0)
    room = WIDTH * _POINTS - label_room - 12
    most = max((row.end for row in chart.rows), default=0.0) or 1.0
    canvas.set_xlim(0, most * room / max(room - widest - 8, 0.3 * room))
    canvas.set_ylim(len(chart.rows) - 0.4, -0.6)
    canvas.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    canvas.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    canvas.set_xlabel(plain(chart.x))
    return figure


def _draw_cloud(cloud: Cloud) -> Figure:
    unit = WIDTH * _POINTS / CLOUD_WIDTH  # points
    figure, canvas = _sheet(cloud.height * unit / _POINTS, cloud.note, [])
    canvas.set_axis_off()
    canvas.set(xlim=(0, CLOUD_WIDTH), ylim=(cloud.height, 0))
    for number, word in enumerate(cloud.words):
        text, size = plain(word.text), word.size * unit
        size *= min(1.0, (word.room - 4) * unit / max(text_width(text, size), 1e-6))
        colour = _WORDS[number % len(_WORDS)]
        canvas.text(word.x, word.y, text, fontsize=size, ha="center", color=colour)
    return figure


def _sheet(height: float, note: str, named: Sequence[Series]) -> tuple[Figure, Canvas]:
    """A figure with axes `height` inches high, and below them the legend of the series with a name
    and the note.
    """
    room = (WIDTH - 2 * _EDGE) * _POINTS
    notes = _wrapped(note, _NOTE, room)
    labels = [shorten(one.label, _LEGEND, room - 30) for one in named]
    columns = max(1, int(room // (30 + max(map(_legend_width, labels), default=0.0))))
    rows = math.ceil(len(labels) / columns)
    note_height = (1.3 * _NOTE * len(notes) + 2) / _POINTS if notes else 0.0
    legend_height = (1.4 * _LEGEND * rows + 5) / _POINTS if rows else 0.0
    below = note_height + legend_height
    whole = height + below
    figure = Figure(figsize=(WIDTH, whole), layout="constrained")
    engine: Any = figure.get_layout_engine()
    engine.set(w_pad=_EDGE, h_pad=2 * _EDGE, rect=(0, below / whole, 1, height / whole))
    figure.text(
        _EDGE / WIDTH,
        (note_height - 1 / _POINTS) / whole,
        "\n".join(notes),
        fontsize=_NOTE,
        color="#444444",
        va="top",
        linespacing=1.3,
    )
    if labels:
        legend = figure.legend(
            handles=[Line2D([], [], **_look(one)) for one in named],
            labels=["-"] * len(labels),  # a label that begins with _ would be left out
            loc="upper center",
            bbox_to_anchor=(0.5, below / whole),
            ncols=min(columns, len(labels)),
            frameon=False,
            borderpad=0,
            borderaxespad=0.5,
            labelspacing=0.4,
            columnspacing=1.0,
            handlelength=2.6,
            fontsize=_LEGEND,
        )
        legend.set_in_layout(False)
        for text, label in zip(legend.get_texts(), labels, strict=True):
            text.set_text(label)
    return figure, figure.add_subplot()


def _legend_width(label: str) -> float:
    return text_width(label, _LEGEND)


def _wrapped(text: str, size: float, room: float) -> list[str]:
    """Lines of the text, none wider than `room` points unless a word is; "n = 7" is a word."""
    lines: list[str] = []
    for word in plain(text).replace("n = ", "n\u00a0=\u00a0").split(" "):
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and text_width(longer, size) <= room:
            lines[-1] = longer
        else:
            lines.append(word)
    return [line.replace("\u00a0", " ") for line in lines if line]
