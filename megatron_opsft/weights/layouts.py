"""Where every HF tensor sits in somebody's parameters.

A parameter is described by the rectangles of HF tensors in it. Two such descriptions of one model
are all that a transfer plan needs. Pure names and shapes, no process group; vLLM's are in
`vllm_layout`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from megatron_opsft.architectures.template import Rule
from megatron_opsft.errors import UserError
from megatron_opsft.weights.rules import WeightTable
from megatron_opsft.weights.slicing import padding_start, shard_blocks, shard_shape


@dataclass(frozen=True, slots=True)
class Rect:
    """Rows [row0, row1) and columns [col0, col1) of an HF tensor; a vector has one column."""

    row0: int
    row1: int
    col0: int
    col1: int

    @property
    def num_elements(self) -> int:
        return (self.row1 - self.row0) * (self.col1 - self.col0)

    def intersect(self, other: "Rect") -> "Rect | None":
        """What both cover; None where that is nothing."""
        row0, row1 = max(self.row0, other.row0), min(self.row1, other.row1)
        col0, col1 = max(self.col0, other.col0), min(self.col1, other.col1)
        return Rect(row0, row1, col0, col1) if row0 < row1 and col0 < col1 else None


@dataclass(frozen=True, slots=True)
class Part:
    """`rect` of `hf_name` sits in the parameter from (row, col) on.

    index: the leading index (the expert) of a parameter with three axes, else None.
    """

    hf_name: str
    rect: Rect
    row: int
    col: int
    index: int | None = None


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of one rank, as its holder calls it.

    shape: on that rank; one, two or three axes. parts: they cover it exactly once, padding aside.
    padding_row: the first row that is vocabulary padding; the row count where there is none.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    padding_row: int


@dataclass(frozen=True, slots=True)
class Holding:
    """Global ranks that all hold exactly these parameters."""

    ranks: tuple[int, ...]
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True, slots=True)
class Slice:
    """A rectangle of a parameter in the parameter's own rows and columns; index: as in `Part`."""

    parameter: str
    index: int | None
    row0: int
    row1: int
    col0: int
    col1: int

    @property
    def num_elements(self) -> int:
        return (self.row1 - self.row0) * (self.col1 - self.col0)

    def of(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The view of it, [rows, columns], or [rows] of a vector."""
        tensor = tensors[self.parameter]
        if self.index is not None:
            tensor = tensor[self.index]
        rows = tensor[self.row0 : self.row1]
        return rows if rows.dim() == 1 else rows[:, self.col0 : self.col1]


def locate(parameter: str, part: Part, rect: Rect) -> Slice:
    """Where `rect`, which lies inside `part.rect`, sits in the parameter."""
    down, right = part.row - part.rect.row0, part.col - part.rect.col0
    return Slice(
        parameter,
        part.index,
        rect.row0 + down,
        rect.row1 + down,
        rect.col0 + right,
        rect.col1 + right,
    )


def view(tensor: Tensor, part: Part, rect: Rect) -> Tensor:
    """The view of `rect`, which lies inside `part.rect`, in the parameter `tensor`."""
    return locate("", part, rect).of({"": tensor})


def whole(shape: tuple[int, ...]) -> Rect:
    """All of an HF tensor."""
    return Rect(0, shape[0], 0, shape[1] if len(shape) == 2 else 1)


def hf_columns(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """HF name -> columns of the whole tensor."""
    return {name: whole(shape).col1 for name, shape in shapes.items()}


def hf_parameters(shapes: Mapping[str, tuple[int, ...]]) -> tuple[Parameter, ...]:
    """Whole HF tensors (name -> shape) under their own names."""
    return tuple(
        Parameter(name, shape, (Part(name, whole(shape), 0, 0),), shape[0])
        for name, shape in shapes.items()
    )


def megatron_parameters(rules: Iterable[Rule], tp_rank: int, tp_size: int) -> tuple[Parameter, ...]:
    """The shards of these rules on one tensor-parallel rank, under their Megatron names.

    Errors: `UserError` for a tp_size that cannot cut the model.
    """
    return tuple(_megatron_parameter(rule, tp_rank, tp_size) for rule in rules)


def _megatron_parameter(rule: Rule, tp_rank: int, tp_size: int) -> Parameter:
    shapes = dict(zip(rule.hf_names, rule.hf_shapes, strict=True))
    parts = []
    for block in shard_blocks(rule, tp_rank, tp_size):
        rect = whole(shapes[block.hf_name])
        if block.axis == 0:
            rect = Rect(block.hf_start, block.hf_stop, rect.col0, rect.col1)
            parts.append(Part(block.hf_name, rect, block.shard_start, 0))
        else:
            rect = Rect(rect.row0, rect.row1, block.hf_start, block.hf_stop)
            parts.append(Part(block.hf_name, rect, 0, block.shard_start))
    return Parameter(
        rule.mcore_name,
        shard_shape(rule, tp_size),
        tuple(parts),
        padding_start(rule, tp_rank, tp_size),
    )


def megatron_holdings(
    table: WeightTable, *, tp: int, pp: int, dp: int, vpp: int | None = None
) -> tuple[Holding, ...]:
    """Who holds what in Megatron's default rank order: tp fastest, then dp, then pp.

    For planning without processes. Layers are cut evenly; virtual chunk c of stage p is block
    c * pp + p of them. Errors: ValueError where that leaves a remainder; `UserError` for a tp that
    cannot cut the model.
    """
    num_blocks = pp * (vpp or 1)
    if table.shape.num_layers % num_blocks:
        raise ValueError(f"{table.shape.num_layers} layers cannot be cut into {num_blocks} blocks")
    size = table.shape.num_layers // num_blocks
    holdings = []
    for stage in range(pp):
        rules = [
            rule
            for block in range(stage, num_blocks, pp)
            for rule in table.stage_rules(
                range(block * size, (block + 1) * size),
                has_embedding=block == 0,
                has_output=block == num_blocks - 1,
            )
        ]
        for tp_rank in range(tp):
            ranks = tuple((stage * dp + dp_rank) * tp + tp_rank for dp_rank in range(dp))
            holdings.append(Holding(ranks, megatron_parameters(rules, tp_rank, tp)))
    return tuple(holdings)


def engine_holdings(
    parameters_of: Callable[[int], tuple[Parameter, ...]], tp_size: int, world_size: int
) -> tuple[Holding, ...]:
    """Who holds what where engine r lives on ranks r * tp_size to (r + 1) * tp_size - 1.

    parameters_of: tensor-parallel rank -> its parameters. Errors: `UserError` where the world does
    not divide into engines.
    """
    if world_size % tp_size:
        raise UserError(f"rollout.tp={tp_size} does not divide the number of ranks, {world_size}")
    return tuple(
        Holding(tuple(range(tp_rank, world_size, tp_size)), parameters_of(tp_rank))
        for tp_rank in range(tp_size)
    )
