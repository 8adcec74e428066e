"""What the weight tables are made of: an architecture's rows, and the rules of one model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class ShardKind(Enum):
    """How the HF tensors of a row make up the Megatron parameter, and how TP cuts it.

    COPY        the same tensor on every TP rank
    VOCABULARY  axis 0 cut; rows beyond the HF vocabulary are zero padding
    ROW         axis 1 cut
    QKV         axis 0; query groups one behind the other, each its q heads, its k head, its v head;
                TP cuts between groups
    GATE_UP     axis 0; each TP rank holds its part of gate, then its part of up
    """

    COPY = "copy"
    VOCABULARY = "vocabulary"
    ROW = "row"
    QKV = "qkv"
    GATE_UP = "gate_up"


@dataclass(frozen=True, slots=True)
class Template:
    """One row. `{layer}` and `{expert}` in a name stand for the global indices.

    mcore_name: as the local layer spec (plain norm modules) calls it; te_name: as the Transformer
    Engine spec does, where that differs (norms fused into the linear that follows, grouped
    experts).
    hf_tensors: (name, axes) in the order in which they are fused; an axis is a key of
    `rules.axis_sizes`.
    """

    mcore_name: str
    kind: ShardKind
    hf_tensors: tuple[tuple[str, tuple[str, ...]], ...]
    te_name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A row for one layer (and expert) of one model: a Megatron parameter and its HF tensors.

    mcore_name: with the global index of layer and expert.
    mcore_shape: of the whole parameter at TP 1, vocabulary padding included.
    num_groups: query groups (k/v heads); 1 unless the kind is QKV.
    is_expert: of one expert, which expert parallelism gives to some ranks alone.
    replica: filled on load but never exported: the last pipeline stage's copy of a tied embedding.
    """

    mcore_name: str
    kind: ShardKind
    hf_names: tuple[str, ...]
    hf_shapes: tuple[tuple[int, ...], ...]
    mcore_shape: tuple[int, ...]
    num_groups: int = 1
    is_expert: bool = False
    replica: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One Hugging Face model class: its rows, and what its config leaves implicit.

    layer_rows: repeated for each layer. The embedding, the final norm and the head are the same for
    all decoders and live in `rules`.
    expert_rows: repeated for each expert of each layer, after the layer's rows.
    fixed_fields: config fields that must have this value or be null; after those of
    `config_from_hf.FIXED_FIELDS`.
    defaults: what the class takes for fields that are absent, where that matters here.
    """

    hf_name: str
    model_type: str
    layer_rows: tuple[Template, ...]
    expert_rows: tuple[Template, ...] = ()
    fixed_fields: tuple[tuple[str, object], ...] = ()
    defaults: Mapping[str, object] = field(default_factory=dict)
