"""The embedded rollout engine: a Hugging Face causal LM inside each rank, decoded by a loop of our
own (`decoding`).
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from megatron_opsft.records import Rollout, Sample
from megatron_opsft.rollout.engine import (
    Checksums,
    EngineShare,
    EngineWeights,
    RolloutEngine,
    SamplingSettings,
    Scores,
    Take,
)
from megatron_opsft.rollout.hf.attention import GROUPED_SDPA
from megatron_opsft.rollout.hf.decoding import ROUNDING, HfDecoding
from megatron_opsft.rollout.hf.fused_experts import by_disk_name
from megatron_opsft.rollout.hf.layout import hf_layout
from megatron_opsft.rollout.requests import Decoder, make_rollouts
from megatron_opsft.runtime.phase import count_done
from megatron_opsft.weights.checksum import parameter_checksums

_ALONE = EngineShare(index=0, count=1)


class HfEngine(RolloutEngine):
    """`RolloutEngine` for any causal LM of transformers that decodes with a `DynamicCache`."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Decoder,
        batch_size: int,
        version: int | None,
        share: EngineShare = _ALONE,
        *,
        exact: bool = False,
    ) -> None:
        """version: of the weights the model holds; None: they are not to be sampled from.

        exact: responses do not depend on the batch they share; for float32 alone, as rounding in
        bfloat16 is no small matter.
        """
        self.share = share
        self.decoding = HfDecoding(model, ROUNDING if exact else 0.0)
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.version = version
        # Tied weights are one parameter under several names.
        self._parameters: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._parameters.update(by_disk_name(name, parameter))
        own = {name: tuple(tensor.shape) for name, tensor in self.named_weights()}
        self.layout = hf_layout(own)

    @classmethod
    def from_config(
        cls,
        model_dir: str | Path,
        tokenizer: Decoder,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        batch_size: int,
        share: EngineShare = _ALONE,
        exact: bool = False,
    ) -> "HfEngine":
        """The model of config.json, its weights allocated but unset: an update comes next."""
        config = AutoConfig.from_pretrained(model_dir)
        # Only parameters stay unset: constructors compute buffers such as rotary frequencies.
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=GROUPED_SDPA
            )
        model.tie_weights()  # skipped together with the initialisation
        return cls(
            model.to(device),
            tokenizer,
            batch_size,
            version=None,
            share=share,
            exact=exact,
        )

    @classmethod
    def from_pretrained(
        cls,
        model_dir: str | Path,
        tokenizer: Decoder,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        batch_size: int,
        exact: bool = False,
    ) -> "HfEngine":
        """The model with the weights of the directory, as version 0."""
        model = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=dtype, attn_implementation=GROUPED_SDPA
        )
        return cls(model.to(device), tokenizer, batch_size, version=0, exact=exact)

    def stream(self, take: Take, sampling: SamplingSettings) -> Iterator[list[Rollout]]:
        """See `RolloutEngine.stream`: batch by batch, within a batch every few tokens."""
        if self.version is None:
            raise RuntimeError("the rollout engine holds no complete set of weights")
        while batch := take(self.batch_size):
            for rows in self.decoding.decode(batch, sampling):
                count_done(len(rows))
                yield make_rollouts(
                    [batch[row] for row in rows],
                    list(rows.values()),
                    end_token_ids=sampling.end_token_ids,
                    tokenizer=self.tokenizer,
                    version=self.version,
                )

    @torch.inference_mode()
    def score(self, samples: Sequence[Sample]) -> Scores:
        """See `RolloutEngine.score`; this engine caches nothing between calls."""
        scores = []
        for sample in samples:
            ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
            ids = ids.to(self.model.device)
            kept = len(sample.response_ids) + 1  # the last one predicts what is not there
            logits_RV = self.model(input_ids=ids, logits_to_keep=kept).logits[0, :-1].float()
            log_probs = logits_RV.log_softmax(dim=-1).gather(-1, ids[0, 1 - kept :, None])
            scores.append(tuple(log_probs[:, 0].tolist()))
        return Scores(log_probs=tuple(scores), stale_tokens=0)

    def begin_update(self) -> None:
        """See `RolloutEngine.begin_update`."""
        self.version = None

    def finish_update(self, version: int) -> None:
        """See `RolloutEngine.finish_update`."""
        self.version = version

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See `RolloutEngine.load_weights`. Values are cast to the engine's dtype.

        The second name of tied weights is optional and must bring the same values.
        """
        self.begin_update()
        seen_names: set[str] = set()
        written: set[int] = set()
        for hf_name, tensor in tensors:
            parameter = self._parameters.get(hf_name)
            if parameter is None:
                raise ValueError(f"the rollout model has no weight named {hf_name}")
            if hf_name in seen_names:
                raise ValueError(f"{hf_name} was sent twice")
            if parameter.shape != tensor.shape:
                sent, expected = tuple(tensor.shape), tuple(parameter.shape)
                raise ValueError(f"{hf_name}: sent shape {sent}, expected {expected}")
            seen_names.add(hf_name)
            if id(parameter) not in written:
                parameter.data.copy_(tensor)
                written.add(id(parameter))
            elif not torch.equal(parameter.data, tensor.to(parameter.data)):
                raise ValueError(f"{hf_name} is tied to a weight that was sent with other values")
        missing = [name for name, value in self._parameters.items() if id(value) not in written]
        if missing:
            raise ValueError(f"{len(missing)} weights were not sent: {', '.join(missing[:5])}")
        self.finish_update(version)

    def weights(self) -> EngineWeights:
        """See `RolloutEngine.weights`: the model's own parameters under their HF names."""
        return EngineWeights(tp_rank=0, tensors=dict(self.named_weights()))

    def checksums(self, cuts: int) -> Checksums:
        """See `RolloutEngine.checksums`."""
        return Checksums(
            of_rank={
                0: parameter_checksums(
                    self.layout.parameters_of(0),
                    dict(self.named_weights()),
                    hf_columns=self.layout.hf_columns,
                    cuts=cuts,
                )
            }
        )

    def sleep(self) -> None:
        """Nothing: the model stays where it is."""

    def weight(self, hf_name: str) -> Tensor:
        """The live weight, not a copy; KeyError for an unknown name."""
        return self._parameters[hf_name].data

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every live weight once, under its HF name; tied weights under their first name."""
        seen: set[int] = set()
        for hf_name, parameter in self._parameters.items():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield hf_name, parameter.data

    def close(self) -> None:
        """Drop the model."""
        del self.model, self.decoding, self._parameters
        self.version = None
