"""The weight table of one model: which Hugging Face tensors make up which Megatron parameter.

Only names and shapes; `slicing` says how tensors are cut. The load at start-up, the export, the
weight sync with the engine and the converter all read this one table, in both directions. It is
strict: a missing tensor is an error, and so is an unknown one.
"""

import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from functools import cached_property
from typing import Literal

from megatron_opsft.errors import UserError
from megatron_opsft.models.architectures.families import ARCHITECTURES
from megatron_opsft.models.architectures.shape import ModelShape
from megatron_opsft.models.architectures.template import (
    Section,
    ShardKind,
    Template,
    WeightRule,
)
from megatron_opsft.models.weights.slicing import padded_vocab_size
from megatron_opsft.records import TensorShape

HEAD_NAME = "lm_head.weight"  # some tied checkpoints repeat the embedding under it

EMBEDDING = Template(
    "embedding.word_embeddings.weight",
    ShardKind.VOCABULARY,
    {"embed_tokens.weight": "vocab hidden"},
)
FINAL_NORM = Template(
    "decoder.final_layernorm.weight",
    ShardKind.COPY,
    {"norm.weight": "hidden"},
)
HEAD = Template(
    "output_layer.weight",
    ShardKind.VOCABULARY,
    {HEAD_NAME: "vocab hidden"},
)

# Old checkpoints save this constant of the config.
BUFFER_SUFFIX = ".rotary_emb.inv_freq"


def axis_sizes(shape: ModelShape) -> dict[str, int]:
    """Return this model's size of each axis that shapes of `Template` name: "hidden", "ffn" ..."""
    sizes = {
        "vocab": shape.vocab_size,
        "hidden": shape.hidden_size,
        "ffn": shape.ffn_size,
        "q": shape.num_heads * shape.head_dim,
        "kv": shape.num_kv_heads * shape.head_dim,
        "head": shape.head_dim,
    }
    if shape.gated_attention:
        sizes["gated_q"] = 2 * sizes["q"]
    if shape.moe is not None:
        sizes |= {
            "experts": shape.moe.num_experts,
            "expert_ffn": shape.moe.ffn_size,
            "shared_ffn": shape.moe.shared_ffn_size,
            "one": 1,
        }
    if shape.delta is not None:
        sizes |= {
            "query": shape.delta.key_size,
            "key": shape.delta.key_size,
            "value": shape.delta.value_size,
            "z": shape.delta.value_size,
            "beta": shape.delta.num_value_heads,
            "alpha": shape.delta.num_value_heads,
            "value_head": shape.delta.value_head_dim,
            "conv": shape.delta.conv_size,
            "one": 1,
        }
    return sizes


_LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+")
_EXPERT = re.compile(
    r"(?<=\.local_experts\.)\d+"
    r"|(?<=\.experts\.linear_fc[12]\.weight)\d+"
    r"|(?<=\.experts\.linear_fc[12]\.adapter)\d+"
)


def local_to_global(mcore_name: str, layer_offset: int, expert_offset: int = 0) -> str:
    """Turn a name with this rank's indices into one with the whole model's: of the layer in its
    pipeline stage, and of the expert on its expert-parallel rank.
    """
    name = _LAYER.sub(lambda match: str(int(match[0]) + layer_offset), mcore_name)
    return _EXPERT.sub(lambda match: str(int(match[0]) + expert_offset), name)


class WeightTable:
    """All weight rules of one model, in the order of the model, with lookups by either name."""

    def __init__(
        self,
        shape: ModelShape,
        norm_names: Literal["local", "te"] = "local",
        tp_size: int = 1,
    ) -> None:
        """norm_names: the layer spec that names the norms. tp_size: changes only the padding of the
        vocabulary.
        """
        self.shape = shape
        self.padded_vocab = padded_vocab_size(shape.vocab_size, tp_size)
        self._uses_te_names = norm_names == "te"
        self._axis_sizes = axis_sizes(shape)
        self.architecture = architecture = ARCHITECTURES[shape.architecture]
        rules = [self._rule(EMBEDDING)]
        for layer in range(shape.num_layers):
            is_delta = shape.kind_of(layer) == "linear_attention"
            rows = architecture.delta_rows if is_delta else architecture.layer_rows
            rules += [self._rule(row, layer) for row in rows]
            for expert in range(self.num_experts):
                for row in architecture.expert_rows:
                    rules.append(self._rule(row, layer, expert))
        rules.append(self._rule(FINAL_NORM))
        if shape.tied_embeddings:
            head = self._rule(HEAD._replace(hf_axes=EMBEDDING.hf_axes))
            rules.append(replace(head, replica=True))
        else:
            rules.append(self._rule(HEAD))
        self.rules = tuple(rules)

    @property
    def num_experts(self) -> int:
        """Experts of each layer; 0 for a dense model."""
        return self.shape.moe.num_experts if self.shape.moe else 0

    def _rule(
        self, template: Template, layer: int | None = None, expert: int | None = None
    ) -> WeightRule:
        """Make the rule of one parameter: the template with this model's sizes and names."""
        mcore_prefix, hf_prefix = "", self.architecture.hf_prefix
        if layer is not None:
            mcore_prefix = f"decoder.layers.{layer}."
            hf_prefix += f"layers.{layer}."
        mcore_name = template.mcore_name
        if self._uses_te_names and template.te_name:
            mcore_name = template.te_name
        hf_shapes = {}
        sections: list[Section] = []
        for name, axes in template.hf_axes.items():
            is_head = name == HEAD_NAME
            hf_name = ("" if is_head else hf_prefix) + name.format(expert=expert)
            row_axes, *others = axes.split()
            first_row = 0
            for axis in row_axes.split("+"):
                size = self._axis_sizes[axis]
                sections.append(Section(axis, hf_name, first_row, size))
                first_row += size
            columns = (self._axis_sizes[axis] for axis in others)
            hf_shapes[hf_name] = (first_row, *columns)
        num_rows = sum(section.num_rows for section in sections)
        if template.kind is ShardKind.VOCABULARY:
            num_rows = self.padded_vocab
        return WeightRule(
            mcore_name=mcore_prefix + mcore_name.format(expert=expert),
            kind=template.kind,
            hf_shapes=hf_shapes,
            mcore_shape=(num_rows, *next(iter(hf_shapes.values()))[1:]),
            sections=tuple(sections),
            num_groups=self.shape.num_kv_heads,
            head_dim=self.shape.head_dim,
            layer=layer,
            expert=expert,
            stored_apart=template.stored_apart,
            # Layers of several kinds do not have the same parameters.
            stacks_layers=self.shape.delta is None,
        )

    @property
    def embedding_name(self) -> str:
        """The HF name of the embedding."""
        return next(iter(self.rules[0].hf_shapes))

    def is_carried(self, hf_name: str) -> bool:
        """True for a tensor of another part of the model, which is not trained."""
        return hf_name.startswith(self.architecture.carried)

    @cached_property
    def exported(self) -> tuple[WeightRule, ...]:
        """The rules of all tensors that are written; a tied head is not one of them."""
        return tuple(rule for rule in self.rules if not rule.replica)

    @cached_property
    def by_mcore_name(self) -> dict[str, WeightRule]:
        """Megatron parameter (global name) -> its rule."""
        return {rule.mcore_name: rule for rule in self.rules}

    @cached_property
    def by_hf_name(self) -> dict[str, WeightRule]:
        """HF tensor -> the rule that exports it."""
        rules: dict[str, WeightRule] = {}
        for rule in self.exported:
            rules |= dict.fromkeys(rule.hf_shapes, rule)
        return rules

    def hf_shapes(self) -> dict[str, TensorShape]:
        """Return name -> shape of all tensors of the HF model in its order, without a tied head."""
        shapes: dict[str, TensorShape] = {}
        for rule in self.exported:
            shapes |= rule.hf_shapes
        return shapes

    def stage_rules(
        self,
        layers: range,
        *,
        has_embedding: bool,
        has_output: bool,
        experts: range | None = None,
    ) -> tuple[WeightRule, ...]:
        """Return the rules of a pipeline stage (or virtual stage) that holds these global layers,
        and these experts of each; None: all.

        A tied head is a parameter of its own only on a stage that has the output but not the
        embedding.
        """
        if experts is None:
            experts = range(self.num_experts)
        embedding, *of_layers, final_norm, head = self.rules
        stage = [embedding] if has_embedding else []
        for rule in of_layers:
            if rule.layer in layers and (rule.expert is None or rule.expert in experts):
                stage.append(rule)
        if has_output:
            stage.append(final_norm)
            if not (head.replica and has_embedding):
                stage.append(head)
        return tuple(stage)

    def check_mcore_names(
        self, names: Iterable[str], expected: Iterable[WeightRule]
    ) -> None:
        """Check that a stage's parameters (global names) are exactly those of `expected`.

        Errors: `UserError`.
        """
        actual, wanted = set(names), {rule.mcore_name for rule in expected}
        if actual != wanted:
            raise UserError(
                f"the Megatron model does not fit the weight table of {self.shape.architecture}: "
                + _describe_difference(actual, wanted)
            )

    def check_hf(self, shapes: Mapping[str, TensorShape], where: str) -> None:
        """Check that these tensors (name -> shape) are exactly the HF model's.

        A tied head repeated under its own name is tolerated, and so are saved rotary constants and
        tensors of other parts of the model.
        where: the directory, for the message. Errors: `UserError`.
        """
        wanted = self.hf_shapes()
        if self.shape.tied_embeddings and HEAD_NAME in shapes:
            wanted[HEAD_NAME] = wanted[self.embedding_name]
        names = {
            name
            for name in shapes
            if not name.endswith(BUFFER_SUFFIX) and not self.is_carried(name)
        }
        if names != wanted.keys():
            raise UserError(
                f"{where} does not hold a {self.shape.architecture} as its config.json describes "
                "it: " + _describe_difference(names, wanted.keys())
            )
        for name, shape in wanted.items():
            if tuple(shapes[name]) != shape:
                raise UserError(
                    f"{where}: tensor {name} has shape {list(shapes[name])}, but config.json means "
                    f"{list(shape)}"
                )


def _describe_difference(names: Set[str], wanted: Set[str]) -> str:
    """List the names that are missing and those that are not wanted, at most eight of each."""
    differences = []
    for label, differing in (
        ("missing", wanted - names),
        ("unexpected", names - wanted),
    ):
        if differing:
            text = f"{label} {', '.join(sorted(differing)[:8])}"
            if len(differing) > 8:
                text += f" and {len(differing) - 8} more"
            differences.append(text)
    return "; ".join(differences)
