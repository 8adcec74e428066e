"""The weight table of one model: which Hugging Face tensors make up which Megatron parameter.

Pure names and shapes; how the bytes are cut is in `slicing`. The start-up load, the export, the
push to the engine and the converter all read this one table, in both directions, and it is strict
both ways.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Literal

from megatron_opsft.errors import UserError
from megatron_opsft.models.architectures.families import ARCHITECTURES
from megatron_opsft.models.architectures.shape import ModelShape
from megatron_opsft.models.architectures.template import Rule, ShardKind, Template
from megatron_opsft.models.weights.slicing import padded_vocab_size

EMBEDDING = Template(
    "embedding.word_embeddings.weight",
    ShardKind.VOCABULARY,
    (("model.embed_tokens.weight", ("vocab", "hidden")),),
)
FINAL_NORM = Template(
    "decoder.final_layernorm.weight",
    ShardKind.COPY,
    (("model.norm.weight", ("hidden",)),),
)
HEAD = Template(
    "output_layer.weight",
    ShardKind.VOCABULARY,
    (("lm_head.weight", ("vocab", "hidden")),),
)

TIED_HEAD = (
    "lm_head.weight"  # some tied checkpoints repeat the embedding under this name
)
BUFFER_SUFFIX = (
    ".rotary_emb.inv_freq"  # old checkpoints save this constant of the config
)


def axis_sizes(shape: ModelShape) -> dict[str, int]:
    """The sizes behind the axis names of the templates."""
    experts = {}
    if shape.moe is not None:
        experts = {"experts": shape.moe.num_experts, "expert_ffn": shape.moe.ffn_size}
    return {
        **experts,
        "vocab": shape.vocab_size,
        "hidden": shape.hidden_size,
        "ffn": shape.ffn_size,
        "q": shape.num_heads * shape.head_dim,
        "kv": shape.num_kv_heads * shape.head_dim,
        "head": shape.head_dim,
    }


_LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+")
_EXPERT = re.compile(
    r"(?<=\.local_experts\.)\d+|(?<=\.experts\.linear_fc[12]\.weight)\d+"
)


def local_to_global(mcore_name: str, layer_offset: int, expert_offset: int = 0) -> str:
    """The name with its indices moved from this rank's count to the whole model's: of the layer in
    its pipeline stage, and of the expert among those of its expert-parallel rank.
    """
    name = _LAYER.sub(lambda match: str(int(match[0]) + layer_offset), mcore_name)
    return _EXPERT.sub(lambda match: str(int(match[0]) + expert_offset), name)


class WeightTable:
    """All rules of one model, in the order of the model, with lookups by either name."""

    def __init__(
        self,
        shape: ModelShape,
        norm_names: Literal["local", "te"] = "local",
        tp_size: int = 1,
    ) -> None:
        """norm_names: which layer spec names the norms; tp_size: matters for the padded vocabulary
        alone.
        """
        self.shape = shape
        self.padded_vocab = padded_vocab_size(shape.vocab_size, tp_size)
        self._te = norm_names == "te"
        self._sizes = axis_sizes(shape)
        self._architecture = ARCHITECTURES[shape.architecture]
        last = [self._rule(FINAL_NORM)]
        if shape.tied_embeddings:
            tied = Template(HEAD.mcore_name, HEAD.kind, EMBEDDING.hf_tensors)
            last.append(self._rule(tied, replica=True))
        else:
            last.append(self._rule(HEAD))
        layers = [
            self._rule(row, layer, expert)
            for layer in range(shape.num_layers)
            for row, expert in self._rows_of_layer(range(self.num_experts))
        ]
        self.rules: tuple[Rule, ...] = (self._rule(EMBEDDING), *layers, *last)

    @property
    def num_experts(self) -> int:
        """Of each layer; 0 without any."""
        return self.shape.moe.num_experts if self.shape.moe else 0

    def _rows_of_layer(self, experts: range) -> Iterator[tuple[Template, int | None]]:
        """Rows of one layer, each with the expert it is for."""
        for row in self._architecture.layer_rows:
            yield row, None
        for expert in experts:
            for row in self._architecture.expert_rows:
                yield row, expert

    def _mcore_name(
        self, template: Template, layer: int = 0, expert: int | None = None
    ) -> str:
        name = (
            template.te_name if self._te and template.te_name else template.mcore_name
        )
        return name.format(layer=layer, expert=expert)

    def _rule(
        self,
        template: Template,
        layer: int = 0,
        expert: int | None = None,
        *,
        replica: bool = False,
    ) -> Rule:
        shapes = tuple(
            tuple(self._sizes[a] for a in axes) for _, axes in template.hf_tensors
        )
        rows = sum(s[0] for s in shapes)
        if template.kind is ShardKind.VOCABULARY:
            rows = self.padded_vocab
        return Rule(
            mcore_name=self._mcore_name(template, layer, expert),
            kind=template.kind,
            hf_names=tuple(
                name.format(layer=layer, expert=expert)
                for name, _ in template.hf_tensors
            ),
            hf_shapes=shapes,
            mcore_shape=(rows, *shapes[0][1:]),
            num_groups=self.shape.num_kv_heads if template.kind is ShardKind.QKV else 1,
            is_expert=expert is not None,
            replica=replica,
        )

    @cached_property
    def exported(self) -> tuple[Rule, ...]:
        """The rules of what is written: a tied head is not a separate tensor."""
        return tuple(rule for rule in self.rules if not rule.replica)

    @cached_property
    def by_mcore_name(self) -> dict[str, Rule]:
        """Megatron parameter (global name) -> its rule."""
        return {rule.mcore_name: rule for rule in self.rules}

    @cached_property
    def by_hf_name(self) -> dict[str, Rule]:
        """HF tensor -> the rule that exports it."""
        return {name: rule for rule in self.exported for name in rule.hf_names}

    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor of the HF model, in its order (a tied head is not one)."""
        return {
            name: shape
            for rule in self.exported
            for name, shape in zip(rule.hf_names, rule.hf_shapes, strict=True)
        }

    def stage_rules(
        self,
        layers: Iterable[int],
        *,
        has_embedding: bool,
        has_output: bool,
        experts: range | None = None,
    ) -> tuple[Rule, ...]:
        """The rules of one pipeline stage (or virtual stage) that holds these global layers, and of
        each these experts; None: all.

        A tied head is a parameter of its own only on a stage that has the output but not the
        embedding.
        """
        wanted = {
            self._mcore_name(row, layer, expert)
            for layer in layers
            for row, expert in self._rows_of_layer(
                range(self.num_experts) if experts is None else experts
            )
        }
        if has_embedding:
            wanted.add(EMBEDDING.mcore_name)
        if has_output:
            wanted.add(FINAL_NORM.mcore_name)
            if not (self.shape.tied_embeddings and has_embedding):
                wanted.add(HEAD.mcore_name)
        return tuple(rule for rule in self.rules if rule.mcore_name in wanted)

    def check_mcore_names(self, names: Iterable[str], expected: Iterable[Rule]) -> None:
        """UserError unless a stage's parameters (global names) are exactly those of `expected`."""
        have, want = set(names), {rule.mcore_name for rule in expected}
        if have != want:
            raise UserError(
                f"the Megatron model does not fit the weight table of {self.shape.architecture}: "
                + _difference(have, want)
            )

    def check_hf(self, shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
        """UserError unless these tensors (name -> shape) are exactly the HF model's.

        where: the directory, for the message.
        Tolerated: a tied head repeated under its own name, and saved rotary constants.
        """
        want = self.hf_shapes()
        if self.shape.tied_embeddings:
            want_head = (
                {TIED_HEAD: want[EMBEDDING.hf_tensors[0][0]]}
                if TIED_HEAD in shapes
                else {}
            )
            want = want | want_head
        have = {n: tuple(s) for n, s in shapes.items() if not n.endswith(BUFFER_SUFFIX)}
        if have.keys() != want.keys():
            raise UserError(
                f"{where} does not hold a {self.shape.architecture} as its config.json describes "
                "it: " + _difference(set(have), set(want))
            )
        for name, shape in want.items():
            if have[name] != shape:
                raise UserError(
                    f"{where}: tensor {name} has shape {list(have[name])}, but config.json means "
                    f"{list(shape)}"
                )


def _difference(have: set[str], want: set[str]) -> str:
    parts = []
    for label, names in (("missing", want - have), ("unexpected", have - want)):
        if names:
            shown = ", ".join(sorted(names)[:8])
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            parts.append(f"{label} {shown}{more}")
    return "; ".join(parts)
