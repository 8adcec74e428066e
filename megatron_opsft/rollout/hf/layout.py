"""Where transformers keeps a model's weights: under their own names, whole."""

from collections.abc import Mapping

from megatron_opsft.rollout.engine import EngineLayout
from megatron_opsft.weights.rectangles import hf_columns, hf_parameters


def hf_layout(shapes: Mapping[str, tuple[int, ...]]) -> EngineLayout:
    """shapes: HF name -> shape, in the order that the layout's parameters have."""
    parameters = hf_parameters(shapes)
    return EngineLayout(
        tp_size=1, parameters_of=lambda tp_rank: parameters, hf_columns=hf_columns(shapes)
    )
