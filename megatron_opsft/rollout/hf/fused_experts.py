"""Experts as transformers 5 holds them, under the names they have in a model directory.

In memory the experts of a layer are two stacked parameters; on disk, and so in the weight tables,
each expert has three matrices of its own. Both are the same numbers: gate rows, then up rows.
"""

from collections.abc import Iterator

from torch import Tensor

GATE_UP, DOWN = ".experts.gate_up_proj", ".experts.down_proj"


def by_disk_name(name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A parameter's values under their disk names; views of it if it stacks experts, else itself.

    value: a parameter or anything of its shape: [experts, 2 ffn, hidden] for gate and up,
    [experts, hidden, ffn] for down.
    """
    if name.endswith(GATE_UP):
        prefix = name.removesuffix("gate_up_proj")
        for expert, gate_up in enumerate(value):
            gate, up = gate_up.chunk(2)
            yield f"{prefix}{expert}.gate_proj.weight", gate
            yield f"{prefix}{expert}.up_proj.weight", up
    elif name.endswith(DOWN):
        prefix = name.removesuffix("down_proj")
        for expert, down in enumerate(value):
            yield f"{prefix}{expert}.down_proj.weight", down
    else:
        yield name, value
