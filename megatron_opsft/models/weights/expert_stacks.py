"""Stacks of experts: all matrices of a layer's experts in two tensors.

transformers holds every mixture of experts so, and Qwen3.5's published files do too. Weight tables
name each expert's matrices by themselves. The bytes are the same: `gate_up_proj`, [experts, 2 ffn,
hidden], has the gate of the first expert, then its up, then those of the second; `down_proj` is
[experts, hidden, ffn]. So a stack is read and written by other names and offsets alone.
"""

import re
from collections.abc import Mapping

from megatron_opsft.records import TensorShape

_MATRICES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
# Those of layers: a head that predicts more tokens, `mtp.`, is not trained and stays as it is.
_EXPERTS = r"^(model\.(?:.+\.)?layers\.\d+\.mlp\.experts)\."
_STACK = re.compile(_EXPERTS + r"(gate_up_proj|down_proj)$")
_MATRIX = re.compile(_EXPERTS + r"(\d+)\.(gate_proj|up_proj|down_proj)\.weight$")


def matrices_of(name: str, shape: TensorShape) -> dict[str, TensorShape]:
    """Return name -> shape of the matrices in a stack, as they follow each other in memory; {} for
    a tensor that is no stack.
    """
    match = _STACK.match(name)
    if match is None or len(shape) != 3:
        return {}
    prefix, kinds = match[1], _MATRICES[match[2]]
    num_experts, num_rows, num_columns = shape
    if num_rows % len(kinds):
        return {}
    matrices: dict[str, TensorShape] = {}
    for expert in range(num_experts):
        for kind in kinds:
            matrix_name = f"{prefix}.{expert}.{kind}.weight"
            matrices[matrix_name] = (num_rows // len(kinds), num_columns)
    return matrices


def stacked(shapes: Mapping[str, TensorShape]) -> dict[str, TensorShape]:
    """Return the tensors of a model with its experts in stacks, the inverse of `matrices_of`.

    shapes: name -> shape of each tensor, as `WeightTable.hf_shapes` returns them.
    """
    tensors: dict[str, TensorShape] = {}
    for name, shape in shapes.items():
        match = _MATRIX.match(name)
        if match is None:
            tensors[name] = shape
            continue
        prefix, expert, kind = match.groups()
        for stack, kinds in _MATRICES.items():
            if kind in kinds:
                num_rows, num_columns = shape
                tensors[f"{prefix}.{stack}"] = (
                    int(expert) + 1,  # indices only grow
                    len(kinds) * num_rows,
                    num_columns,
                )
    return tensors
