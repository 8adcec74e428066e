"""Rectangles of tensors, copies between them, and parameters that are made of such copies.

Every move of weights is described in these terms: between Hugging Face tensors and Megatron's
shards or an engine's parameters, between trainer and engine, between memory and files. A mapping is
written down once, as copies; the way back is their inverse, and two mappings that meet in one
tensor are joined by `Copy.then`. Only names and numbers: no tensor is read here.
"""

from math import prod
from typing import TYPE_CHECKING, NamedTuple

from megatron_opsft.records import TensorShape

if TYPE_CHECKING:
    from torch import Tensor


class Rect(NamedTuple):
    """Rows [row0, row1) and columns [col0, col1) of a tensor. A vector has one column; all axes of
    a tensor behind the first count as one, except of a tensor of several matrices.
    """

    tensor: str
    """Name of the tensor."""
    row0: int
    row1: int
    col0: int
    col1: int
    matrix: int | None = None
    """Index (the expert) on the first axis of a tensor with three axes; None for any other."""

    def __str__(self) -> str:
        matrix = "" if self.matrix is None else f"{self.matrix}, "
        return (
            f"{self.tensor}[{matrix}{self.row0}:{self.row1}, {self.col0}:{self.col1}]"
        )

    @property
    def num_elements(self) -> int:
        return (self.row1 - self.row0) * (self.col1 - self.col0)

    def intersect(self, other: "Rect") -> "Rect | None":
        """Return the rectangle that lies in both, or None if they share no element."""
        if self.tensor != other.tensor or self.matrix != other.matrix:
            return None
        row0, row1 = max(self.row0, other.row0), min(self.row1, other.row1)
        col0, col1 = max(self.col0, other.col0), min(self.col1, other.col1)
        if row0 >= row1 or col0 >= col1:
            return None
        return Rect(
            self.tensor,
            row0,
            row1,
            col0,
            col1,
            self.matrix,
        )

    def strip(self, axis: int, start: int, stop: int) -> "Rect":
        """Return the rows (axis 0) or columns (axis 1) [start, stop) of a rectangle that begins
        at 0, as far as there are any.
        """
        if axis == 0:
            return self._replace(row0=min(start, self.row1), row1=min(stop, self.row1))
        return self._replace(col0=min(start, self.col1), col1=min(stop, self.col1))

    def shift(self, rows: int, columns: int) -> "Rect":
        """Return the rectangle moved down by `rows` and right by `columns`."""
        return Rect(
            self.tensor,
            self.row0 + rows,
            self.row1 + rows,
            self.col0 + columns,
            self.col1 + columns,
            self.matrix,
        )

    def relative_to(self, outer: "Rect") -> "Rect":
        """Return the same rectangle, counted from the corner of `outer`, in which it lies."""
        return self.shift(-outer.row0, -outer.col0)

    def view(self, tensor: "Tensor") -> "Tensor":
        """Return this rectangle of `tensor`: [rows, columns], or [rows] of a vector."""
        matrix = tensor if self.matrix is None else tensor[self.matrix]
        rows = matrix[self.row0 : self.row1]
        return rows if rows.dim() == 1 else rows.flatten(1)[:, self.col0 : self.col1]


class Copy(NamedTuple):
    """Two rectangles of one size with the same values, to be copied from `source` to `target`."""

    source: Rect
    target: Rect

    @property
    def inverse(self) -> "Copy":
        """The copy from target to source."""
        return Copy(self.target, self.source)

    def cut(self, rect: Rect) -> "Copy | None":
        """Return the part of this copy whose source lies in `rect`, or None if none does."""
        source = self.source.intersect(rect)
        if source is None:
            return None
        if source == self.source:
            return self
        inside = source.relative_to(self.source)
        target = inside.shift(self.target.row0, self.target.col0)
        return Copy(
            source,
            target._replace(tensor=self.target.tensor, matrix=self.target.matrix),
        )

    def cut_target(self, rect: Rect) -> "Copy | None":
        """Return the part of this copy whose target lies in `rect`, or None if none does."""
        part = self.inverse.cut(rect)
        return None if part is None else part.inverse

    def then(self, following: "Copy") -> "Copy | None":
        """Join two copies, a to b and `following` from b to c, into one from a to c. It holds the
        part of b that this copy writes and `following` reads; None if there is no such part.
        """
        onward = following.cut(self.target)
        if onward is None:
            return None
        back = self.cut_target(onward.source)
        assert back is not None  # the source of `onward` lies in this target
        return Copy(back.source, onward.target)


class Parameter(NamedTuple):
    """One parameter of one rank, under the name that the rank's model gives it."""

    name: str
    shape: TensorShape
    """Shape on that rank: one, two or three axes."""
    copies: tuple[Copy, ...]
    """Copies from HF tensors to this parameter. Except for padding they cover it exactly once."""
    is_float32: bool = False
    """True if it is float32 whatever the dtype of the model."""

    @property
    def padding_row(self) -> int:
        """First row of vocabulary padding; the number of rows if there is no padding."""
        return max((copy.target.row1 for copy in self.copies), default=0)

    @property
    def padding(self) -> Rect:
        """The rows of vocabulary padding; an empty rectangle if there are none."""
        has_matrices = any(copy.target.matrix is not None for copy in self.copies)
        shape = self.shape[1:] if has_matrices else self.shape
        return whole(self.name, shape)._replace(row0=self.padding_row)


def whole(name: str, shape: TensorShape) -> Rect:
    """Return the rectangle that covers a tensor of this shape."""
    return Rect(name, 0, num_rows(shape), 0, prod(shape[1:]))


def num_rows(shape: TensorShape) -> int:
    """Return the number of rows of a tensor; a single number, without axes, is one row."""
    return shape[0] if shape else 1
