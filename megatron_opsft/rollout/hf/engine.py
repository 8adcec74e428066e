"""The embedded rollout engine: a Hugging Face causal LM in each rank, decoded by a loop of our own
(`decoding`).
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from megatron_opsft.models.weights.expert_stacks import matrices_of
from megatron_opsft.models.weights.rectangles import Copy, Parameter, whole
from megatron_opsft.models.weights.rules import WeightTable
from megatron_opsft.records import Rollout, Sample
from megatron_opsft.rollout.engine import (
    EngineLayout,
    EngineSettings,
    EngineShare,
    RolloutEngine,
    SamplingSettings,
    Scores,
    Take,
)
from megatron_opsft.rollout.hf.attention import GROUPED_SDPA
from megatron_opsft.rollout.hf.decoding import DecodingPasses, as_bytes, decode
from megatron_opsft.rollout.hf.language_model import language_config
from megatron_opsft.rollout.requests import Decoder, make_rollouts
from megatron_opsft.runtime.phase import count_done


class HfEngine(RolloutEngine):
    """`RolloutEngine` for any causal LM of transformers that decodes with a `DynamicCache`."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Decoder,
        batch_size: int,
        version: int | None,
        share: EngineShare,
        *,
        notes_routing: bool = False,
        hf_prefix: str = "model.",
    ) -> None:
        """version: that of the model's weights; None: nothing may be sampled from them yet.
        hf_prefix: see `by_disk_name`.
        """
        if model.device.type == "cpu":
            # On a CPU there are no other kernels than those that transformers warns of.
            kernels = logging.getLogger("transformers.integrations.hub_kernels")
            kernels.setLevel(logging.ERROR)
        self.share = share
        self.passes = DecodingPasses(model, notes_routing=notes_routing)
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.version = version
        # Every live weight once, under its HF name; tied weights under their first name.
        self._weights: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            self._weights.update(by_disk_name(name, parameter.data, hf_prefix))
        parameters = []
        for name, weight in self._weights.items():
            shape = tuple(weight.shape)
            rect = whole(name, shape)
            parameters.append(Parameter(name, shape, (Copy(rect, rect),)))
        self.layout = EngineLayout(
            tp_size=1, tp_rank=0, parameters_of=lambda tp_rank: tuple(parameters)
        )

    @classmethod
    def from_settings(
        cls,
        settings: EngineSettings,
        table: WeightTable,
        tokenizer: Decoder,
        device: torch.device,
    ) -> "HfEngine":
        """Build the language model of config.json. Its weights are allocated; an update must set
        them.
        """
        config = language_config(settings.model_dir)
        # Only parameters stay unset: constructors compute buffers such as rotary frequencies.
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(
                config,
                dtype=settings.dtype,
                attn_implementation=GROUPED_SDPA,
                trust_remote_code=False,
            )
        model.tie_weights()  # skipped together with the initialisation
        return cls(
            model.to(device),
            tokenizer,
            settings.batch_size,
            version=None,
            share=EngineShare(index=settings.rank, count=settings.world_size),
            notes_routing=settings.notes_routing,
            hf_prefix=table.architecture.hf_prefix,
        )

    def stream(self, take: Take, sampling: SamplingSettings) -> Iterator[list[Rollout]]:
        """See `RolloutEngine.stream`: batch by batch, within a batch every few tokens."""
        if self.version is None:
            raise RuntimeError("the rollout engine holds no complete set of weights")
        while batch := take(self.batch_size):
            for rows in decode(self.passes, batch, sampling):
                count_done(len(rows))
                yield make_rollouts(
                    [batch[row] for row in rows],
                    [ended.ids for ended in rows.values()],
                    end_token_ids=sampling.end_token_ids,
                    tokenizer=self.tokenizer,
                    version=self.version,
                    routing=[ended.routing for ended in rows.values()],
                )

    @torch.inference_mode()
    def score(self, samples: Sequence[Sample]) -> Scores:
        """See `RolloutEngine.score`; this engine caches nothing between calls."""
        scores, routing = [], []
        for sample in samples:
            tokens = [*sample.prompt_ids, *sample.response_ids]
            ids = torch.tensor([tokens], device=self.model.device)
            num_tokens = len(sample.response_ids)
            # The position before a token predicts it; the last position predicts none of them.
            logits_RV = (
                self.model(input_ids=ids, logits_to_keep=num_tokens + 1)
                .logits[0, :-1]
                .float()
            )
            experts = as_bytes(self.passes.routing(*ids.shape)[0, :-1])
            if experts:
                routing.append(experts)
            response_R1 = ids[0, -num_tokens:, None]
            log_probs_R1 = logits_RV.log_softmax(dim=-1).gather(-1, response_R1)
            scores.append(tuple(log_probs_R1[:, 0].tolist()))
        return Scores(log_probs=tuple(scores), stale_tokens=0, routing=tuple(routing))

    def copy_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """See `RolloutEngine.copy_weights`. Values are cast to the engine's dtype."""
        for hf_name, tensor in tensors:
            self._weights[hf_name].copy_(tensor)

    def weights(self) -> Mapping[str, Tensor]:
        """See `RolloutEngine.weights`: the model's own parameters under their HF names."""
        return self._weights

    def close(self) -> None:
        """Drop the model."""
        del self.model, self.passes, self._weights
        self.version = None


def by_disk_name(
    name: str, value: Tensor, hf_prefix: str = "model."
) -> Iterator[tuple[str, Tensor]]:
    """Yield the values of a parameter under their disk names: views, if it stacks experts.

    transformers 5 stacks the experts of a layer in two parameters; see `weights.expert_stacks`.

    value: a parameter or anything of its shape. hf_prefix: `Architecture.hf_prefix`, which stands
    on disk for the "model." of a language model by itself.
    """
    if name.startswith("model."):
        name = hf_prefix + name.removeprefix("model.")
    matrices = matrices_of(name, tuple(value.shape))
    if not matrices:
        yield name, value
        return
    num_rows = {shape[0] for shape in matrices.values()}.pop()
    yield from zip(matrices, value.flatten(0, 1).split(num_rows), strict=True)
