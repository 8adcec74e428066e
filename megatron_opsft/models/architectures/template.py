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
    GATED_QKV = "gated_qkv"
    """As `QKV`, and q_proj has rows for an output gate too: each head has its query, then its gate.
    A group of the Megatron parameter has all its queries, all its gates, its k head, its v head.
    """
    COLUMN = "column"
    """Axis 0 is cut; each TP rank has its share of every section in turn, such as of gate, then of
    up.
    """

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
    key of `rules.axis_sizes`, or for rows a sum of such: "query+key+value hidden" are the sections
    of a matrix, which are cut each by itself.
    """
    te_name: str | None = None
    """Name in the TransformerEngine spec, if it differs: norms fused into the linear that follows,
    grouped experts.
    """
    stored_apart: bool = False
    """True if Megatron's checkpoints hold each section as a tensor of its own, which has the
    section's name behind the parameter's.
    """


class Section(NamedTuple):
    """Rows of an HF tensor that are cut between tensor-parallel ranks by themselves."""

    name: str
    """Its axis in `Template.hf_axes`."""
    hf_name: str
    start: int
    """The first of its rows in the HF tensor."""
    num_rows: int


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
    sections: tuple[Section, ...]
    """The sections of all HF tensors, in the order in which they are fused."""
    num_groups: int
    """Query groups (k/v heads) of the model."""
    head_dim: int
    """Size of an attention head."""
    layer: int | None = None
    """Global index of its layer; None for the embedding, the final norm and the head."""
    expert: int | None = None
    """Global index of its expert; None for a parameter of no expert."""
    replica: bool = False
    """True for a parameter that is loaded but never exported: the last pipeline stage's copy of a
    tied embedding.
    """
    stored_apart: bool = False
    """True if Megatron's checkpoints hold each section as a tensor of its own."""
    stacks_layers: bool = True
    """True if one tensor of Megatron's checkpoints holds the parameter of all layers."""

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
    """Rows of every layer with attention. All decoders share the embedding, the final norm and the
    head, which are in `rules`.
    """
    delta_rows: tuple[Template, ...] = ()
    """Rows of every layer with a gated delta net in the place of attention; (): there are none."""
    expert_rows: tuple[Template, ...] = ()
    """Rows of every expert of every layer, after the layer's rows."""
    has_shared_expert: bool = False
    """True if every token also uses one expert of its own size."""
    stacks_experts: bool = False
    """True if published files have the experts of a layer stacked, see `weights.expert_stacks`."""
    fixed_fields: tuple[tuple[str, object], ...] = ()
    """Config fields that must have this value or be null, besides `config_from_hf.FIXED_FIELDS`."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Values that the class takes for absent fields, if they matter here."""
    hf_prefix: str = "model."
    """What the names of all HF tensors begin with, except for the head's."""
    nested_in: str | None = None
    """The field of config.json with the language model's configuration; None: the whole file."""
    carried: tuple[str, ...] = ()
    """What names of HF tensors begin with that belong to other parts of the model, such as vision.
    They are not trained, and every copy of the model has them unchanged.
    """
    zero_centered_norms: bool = False
    """True if norms, except a gated delta net's own, multiply by 1 + weight."""
    rotary_share: float | None = None
    """Which share of a head's numbers rotary positions turn if config.json does not say; None: it
    may only be all of them.
    """
    rope_fields: frozenset[str] = frozenset()
    """More settings that rotary positions may have, because they change nothing for text."""
