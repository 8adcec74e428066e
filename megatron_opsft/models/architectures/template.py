"""Rows of an architecture, and weight rules of one model: weight tables consist of them."""

from collections.abc import Mapping
from dataclasses import field
from enum import Enum
from typing import NamedTuple

from megatron_opsft.records import TensorShape, record


class ShardKind(Enum):
    """How the HF tensors of a row make up the Megatron parameter, and how tensor parallelism (TP)
    cuts it.
    """

    COPY = "copy"
    """The same tensor on every TP rank."""
    VOCABULARY = "vocabulary"
    """Axis 0 is cut; rows beyond the HF vocabulary are zero padding."""
    ROW = "row"
    """Axis 1 is cut."""
    QKV = "qkv"
    """Axis 0 is cut between query groups. They follow one another; each has its q heads, then its k
    head, then its v head.
    """
    GATE_UP = "gate_up"
    """Axis 0 is cut; each TP rank has its share of gate, then its share of up."""

    @property
    def axis(self) -> int:
        """The axis that is cut, if one is."""
        return 1 if self is ShardKind.ROW else 0


class Template(NamedTuple):
    """A row of a weight table. `{expert}` in a name stands for the expert's global index. Names in
    a row of a layer lack the layer's prefix.
    """

    mcore_name: str
    """Name in the local layer spec, which has plain norm modules."""
    kind: ShardKind
    hf_axes: Mapping[str, str]
    """Name -> axes, separated by spaces, in the order in which the tensors are fused. An axis is a
    key of `rules.axis_sizes`.
    """
    te_name: str | None = None
    """Name in the TransformerEngine spec, if it differs: norms fused into the linear that follows,
    grouped experts.
    """


@record
class WeightRule:
    """A row of the weight table of one model, for one layer (and expert): a Megatron parameter and
    its HF tensors.
    """

    mcore_name: str
    """Name with the global index of layer and expert."""
    kind: ShardKind
    hf_shapes: Mapping[str, TensorShape]
    """Name -> shape of each HF tensor, in the order in which they are fused."""
    mcore_shape: TensorShape
    """Shape of the whole parameter at TP 1, vocabulary padding included."""
    num_groups: int
    """Query groups (k/v heads) of the model."""
    layer: int | None = None
    """Global index of its layer; None for the embedding, the final norm and the head."""
    expert: int | None = None
    """Global index of its expert; None for a parameter of no expert."""
    replica: bool = False
    """True for a parameter that is loaded but never exported: the last pipeline stage's copy of a
    tied embedding.
    """

    @property
    def is_expert(self) -> bool:
        """True for a parameter of one expert, which only some expert-parallel ranks have."""
        return self.expert is not None


@record
class Architecture:
    """A Hugging Face model class: its rows, and what its config leaves implicit."""

    hf_name: str
    model_type: str
    layer_rows: tuple[Template, ...]
    """Rows of every layer. All decoders share the embedding, the final norm and the head, which are
    in `rules`.
    """
    expert_rows: tuple[Template, ...] = ()
    """Rows of every expert of every layer, after the layer's rows."""
    fixed_fields: tuple[tuple[str, object], ...] = ()
    """Config fields that must have this value or be null, besides `config_from_hf.FIXED_FIELDS`."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Values that the class takes for absent fields, if they matter here."""
