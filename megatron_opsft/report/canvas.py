"""Figures as files, without a display or the global state of pyplot: same data, same bytes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_opsft.errors import UserError

_SUFFIXES = (".png", ".svg", ".pdf")


def check_suffixes(out_paths: Sequence[Path]) -> None:
    """Errors: `UserError` for a format that is not drawn."""
    for path in out_paths:
        if path.suffix not in _SUFFIXES:
            raise UserError(f"figure {path}: the suffix must be one of {', '.join(_SUFFIXES)}")


@contextmanager
def figure_saved_as(
    out_paths: Sequence[Path], size: tuple[float, float], font_size: int = 10
) -> Iterator[Any]:
    """A matplotlib figure to draw into, written to each path at the end. size: inches."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    check_suffixes(out_paths)
    with matplotlib.rc_context({"svg.hashsalt": "megatron-opsft", "font.size": font_size}):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
        for path in out_paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=150, metadata=metadata.get(path.suffix))
