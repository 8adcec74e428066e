"""Rectangles of tensors, copies between them, and parameters that are made of such copies.

Every move of weights is described in these terms: between Hugging Face tensors and Megatron's
shards or an engine's parameters, between trainer and engine, between memory and files. A mapping is
written down once, as copies; the way back is their inverse, and two mappings that meet in one
tensor are joined by `Copy.then`. Pure names and numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Rect(NamedTuple):
    """Rows [row0, row1) and columns [col0, col1) of a tensor; a vector has one column.

    matrix: which one (expert) of a tensor with three axes, else None.
    """

    tensor: str
    row0: int
    row1: int
    col0: int
    col1: int
    matrix: int | None = None

    def __str__(self) -> str:
        matrix = "" if self.matrix is None else f"{self.matrix}, "
        return (
            f"{self.tensor}[{matrix}{self.row0}:{self.row1}, {self.col0}:{self.col1}]"
        )

    @property
    def num_elements(self) -> int:
        return (self.row1 - self.row0) * (self.col1 - self.col0)

    def intersect(self, other: "Rect") -> "Rect | None":
        """What both cover; None where that is nothing."""
        if self.tensor != other.tensor or self.matrix != other.matrix:
            return None
        _, row0, row1, col0, col1, _ = self
        if (
            other.row0 <= row0 < row1 <= other.row1
            and other.col0 <= col0 < col1 <= other.col1
        ):
            return self  # nearly always
        row0, row1 = max(row0, other.row0), min(row1, other.row1)
        col0, col1 = max(col0, other.col0), min(col1, other.col1)
        both = Rect(self.tensor, row0, row1, col0, col1, self.matrix)
        return both if row0 < row1 and col0 < col1 else None

    def relative_to(self, outer: "Rect") -> "Rect":
        """The same, its rows and columns counted from the corner of `outer`, which holds it."""
        rows = self.row0 - outer.row0, self.row1 - outer.row0
        return Rect(self.tensor, *rows, self.col0 - outer.col0, self.col1 - outer.col0)

    def view(self, tensor: Tensor) -> Tensor:
        """This rectangle of the given tensor: [rows, columns], or [rows] of a vector."""
        matrix = tensor if self.matrix is None else tensor[self.matrix]
        rows = matrix[self.row0 : self.row1]
        return rows if rows.dim() == 1 else rows[:, self.col0 : self.col1]


class Copy(NamedTuple):
    """The values of `source` are those of `target`; both have the same numbers of rows, columns."""

    source: Rect
    target: Rect

    @property
    def inverse(self) -> "Copy":
        """The way back."""
        return Copy(self.target, self.source)

    def cut(self, rect: Rect) -> "Copy | None":
        """The part of it whose source lies in `rect`; None where that is nothing."""
        source, target = self.source.intersect(rect), self.target
        if source is None or source == self.source:
            return source and self
        down, right = target.row0 - self.source.row0, target.col0 - self.source.col0
        rows = source.row0 + down, source.row1 + down
        columns = source.col0 + right, source.col1 + right
        return Copy(source, Rect(target.tensor, *rows, *columns, target.matrix))

    def then(self, following: "Copy") -> "Copy | None":
        """From this source straight to the following target, as far as both reach; else None."""
        onward = following.cut(self.target)
        back = None if onward is None else self.inverse.cut(onward.source)
        return (
            None if onward is None or back is None else Copy(back.target, onward.target)
        )


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of one rank, as its holder calls it.

    shape: on that rank; one, two or three axes. parts: copies from HF tensors that cover it exactly
    once, padding aside. padding_row: the first row that is vocabulary padding; the row count where
    there is none.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[Copy, ...]
    padding_row: int

    @property
    def padding(self) -> Rect:
        """The vocabulary padding; without any, no rows."""
        columns = 1 if len(self.shape) == 1 else self.shape[-1]
        return Rect(self.name, self.padding_row, self.shape[-2:][0], 0, columns)


def whole(name: str, shape: tuple[int, ...]) -> Rect:
    """All of a vector or matrix."""
    return Rect(name, 0, shape[0], 0, shape[1] if len(shape) == 2 else 1)


def hf_parameters(shapes: Mapping[str, tuple[int, ...]]) -> tuple[Parameter, ...]:
    """Whole HF tensors (name -> shape) under their own names."""
    rects = {name: whole(name, shape) for name, shape in shapes.items()}
    return tuple(
        Parameter(n, shapes[n], (Copy(r, r),), r.row1) for n, r in rects.items()
    )
