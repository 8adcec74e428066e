"""The embedded rollout engine: a Hugging Face causal LM inside each rank, decoded by our own loop.

`model.generate` shares one random stream over a batch, so a response would depend on its
neighbours. This loop draws every token from the response's own seed, prefills the prompt of a group
once, and drops finished responses from the batch.

What is left of the neighbours is rounding: it may move a border of the distribution across the
number that is drawn. An exact engine finds the draws that are so close to a border, and takes them
from logits that are computed for the response alone, on one thread. So its responses are the same
in every batch, as long as rounding moves no cumulative probability by more than `ROUNDING`.

Shapes: P prompts of a batch, N responses still decoding, S prompt length with padding, L longest
response, V vocabulary.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.initialization import no_init_weights

from megatron_opsft.records import Rollout, Sample
from megatron_opsft.rollout.attention import GROUPED_SDPA
from megatron_opsft.rollout.engine import (
    Checksums,
    EngineLayout,
    EngineWeights,
    PromptRequest,
    Replica,
    SamplingSettings,
    Scores,
    Take,
    single_requests,
    split_batches,
)
from megatron_opsft.rollout.fused_experts import by_disk_name
from megatron_opsft.rollout.kv_cache import make_room
from megatron_opsft.rollout.responses import Decoder, make_rollouts
from megatron_opsft.rollout.sampling import sample_tokens, sample_with_margins, uniforms
from megatron_opsft.runtime.threads import one_thread
from megatron_opsft.weights.layouts import hf_columns, hf_parameters
from megatron_opsft.weights.proof import parameter_checksums

# The composition of a batch moved cumulative probabilities by at most 4e-6 (0.7 M parameters) and
# 2e-5 (8 layers of hidden size 1,536), both in float32 at temperature 0.6.
ROUNDING = 1e-4
_CHECK_EVERY = 4  # tokens between looks at who has finished: each look waits for the device
_ALONE = Replica(index=0, count=1)
_COMPACT_AT = 0.25  # share of finished rows from which dropping them pays for copying the cache


class HfEngine:
    """`RolloutEngine` for any causal LM of transformers that decodes with a `DynamicCache`."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Decoder,
        batch_size: int,
        version: int | None,
        replica: Replica = _ALONE,
        *,
        exact: bool = False,
    ) -> None:
        """version: of the weights the model holds; None: they are not to be sampled from.

        exact: responses do not depend on the batch they share; for float32 alone, as rounding in
        bfloat16 is no small matter.
        """
        self.replica = replica
        self.noise = ROUNDING if exact else 0.0
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.version = version
        # Tied weights are one parameter under several names.
        self._parameters: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._parameters.update(by_disk_name(name, parameter))
        own = {name: tuple(tensor.shape) for name, tensor in self.named_weights()}
        parameters = hf_parameters(own)
        self.layout = EngineLayout(
            tp_size=1, parameters_of=lambda tp_rank: parameters, hf_columns=hf_columns(own)
        )

    @classmethod
    def from_config(
        cls,
        model_dir: str | Path,
        tokenizer: Decoder,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        batch_size: int,
        replica: Replica = _ALONE,
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
            model.to(device), tokenizer, batch_size, version=None, replica=replica, exact=exact
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

    def generate(
        self, prompts: Sequence[PromptRequest], sampling: SamplingSettings
    ) -> list[Rollout]:
        """See `RolloutEngine.generate`. RuntimeError before the first complete `load_weights`."""
        batches = iter(split_batches(prompts, self.batch_size))
        finished = self.stream(lambda room: next(batches, ()), sampling)
        done = {(r.problem_id, r.sample_index): r for rollouts in finished for r in rollouts}
        return [
            done[prompt.problem_id, index] for prompt in prompts for index in prompt.sample_indices
        ]

    def stream(self, take: Take, sampling: SamplingSettings) -> Iterator[list[Rollout]]:
        """See `StreamingEngine.stream`: batch by batch, within a batch every few tokens."""
        if self.version is None:
            raise RuntimeError("the rollout engine holds no complete set of weights")
        while batch := take(self.batch_size):
            yield from self._generate_batch(batch, sampling)

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
        del self.model, self._parameters
        self.version = None

    @torch.inference_mode()
    def _generate_batch(
        self, batch: Sequence[PromptRequest], sampling: SamplingSettings
    ) -> Iterator[list[Rollout]]:
        """Prefill each prompt once, then decode its responses together; see the module's legend."""
        device = self.model.device
        prompts_PS, mask_PS = _left_pad([request.prompt_ids for request in batch], device)
        cache = DynamicCache(config=self.model.config)
        positions_PS = (mask_PS.cumsum(dim=-1) - 1).clamp_min(0)
        logits_PV = self._forward(prompts_PS, mask_PS, positions_PS, cache)

        counts = torch.tensor([len(request.seeds) for request in batch], device=device)
        owner_N = torch.repeat_interleave(torch.arange(len(batch), device=device), counts)
        cache.batch_select_indices(owner_N)
        make_room(cache)
        places = single_requests(batch)
        finished = self._decode(logits_PV[owner_N], mask_PS[owner_N], cache, places, sampling)
        for rows in finished:
            yield make_rollouts(
                [places[row] for row in rows],
                list(rows.values()),
                end_token_ids=sampling.end_token_ids,
                tokenizer=self.tokenizer,
                version=self._current_version(),
            )

    def _decode(
        self,
        logits_NV: Tensor,
        mask_NS: Tensor,
        cache: DynamicCache,
        places: Sequence[PromptRequest],
        sampling: SamplingSettings,
    ) -> Iterator[dict[int, list[int]]]:
        """Rows as they finish, with their token ids up to the end token; empty in between."""
        num_rows, num_tokens = mask_NS.shape[0], sampling.max_response_tokens
        device = mask_NS.device
        ends = torch.tensor(sampling.end_token_ids, dtype=torch.int64, device=device)
        uniforms_NL = uniforms(
            torch.tensor([place.seeds[0] for place in places], device=device), num_tokens
        )
        tokens_NL = torch.full((num_rows, num_tokens), -1, dtype=torch.int64, device=device)
        next_position_N = mask_NS.sum(dim=-1)
        mask_NT = torch.cat([mask_NS, mask_NS.new_ones(num_rows, num_tokens)], dim=-1)
        rows_N = torch.arange(num_rows, device=device)  # of tokens_NL, for those decoding
        length_N = torch.zeros_like(rows_N)  # with the end token, once it is there
        told: set[int] = set()
        for t in range(num_tokens):
            token_N, sure_N = sample_with_margins(
                logits_NV, uniforms_NL[rows_N, t], sampling.temperature, sampling.top_p, self.noise
            )
            if self.noise and not bool(sure_N.all()):
                for n in (~sure_N & (length_N == 0)).nonzero().squeeze(-1).tolist():
                    row = int(rows_N[n])
                    ids = [*places[row].prompt_ids, *tokens_NL[row, :t].tolist()]
                    token_N[n] = self._sample_alone(ids, uniforms_NL[row, t], sampling)
            tokens_NL[rows_N, t] = token_N
            length_N = torch.where((length_N == 0) & torch.isin(token_N, ends), t + 1, length_N)
            last = t + 1 == num_tokens
            if last:
                length_N = torch.where(length_N == 0, t + 1, length_N)
            if last or t % _CHECK_EVERY == _CHECK_EVERY - 1:
                lengths = dict(zip(rows_N.tolist(), length_N.tolist(), strict=True))
                new = [row for row, length in lengths.items() if length and row not in told]
                yield {row: tokens_NL[row, : lengths[row]].tolist() for row in new}
                told.update(new)
                num_finished = sum(length > 0 for length in lengths.values())
                if num_finished == len(lengths):
                    return
                if num_finished >= _COMPACT_AT * len(lengths):
                    kept = (length_N == 0).nonzero().squeeze(-1)
                    cache.batch_select_indices(kept)
                    rows_N, token_N, length_N = rows_N[kept], token_N[kept], length_N[kept]
                    mask_NT, next_position_N = mask_NT[kept], next_position_N[kept]
            logits_NV = self._forward(
                token_N[:, None],
                mask_NT[:, : mask_NS.shape[1] + t + 1],
                (next_position_N + t)[:, None],
                cache,
            )

    def _sample_alone(
        self, ids: Sequence[int], uniform: Tensor, sampling: SamplingSettings
    ) -> Tensor:
        """The next token, [1], from logits that depend on `ids` alone."""
        with one_thread():
            logits_1V = self.model(
                input_ids=torch.tensor([ids], device=self.model.device),
                use_cache=False,
                logits_to_keep=1,
            ).logits[:, -1]
        return sample_tokens(logits_1V, uniform[None], sampling.temperature, sampling.top_p)

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        """Logits at the last position, [rows, V]; the cache grows by the given tokens."""
        output = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    def _current_version(self) -> int:
        assert self.version is not None
        return self.version


def _left_pad(prompts: Sequence[tuple[int, ...]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids int64 [P, S] and mask bool [P, S], True on tokens; padding is token 0."""
    width = max(len(prompt) for prompt in prompts)
    ids = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[False] * (width - len(prompt)) + [True] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)
