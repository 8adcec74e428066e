"""vLLM inside the training ranks: one worker in each rank, as with vLLM's external launcher.

Only this file, `options` and `cpu` import vllm.
"""

import gc
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from megatron_opsft.errors import SyncError
from megatron_opsft.models.weights.expert_stacks import stacked
from megatron_opsft.models.weights.rules import WeightTable
from megatron_opsft.records import Rollout, Sample
from megatron_opsft.rollout.engine import (
    EngineSettings,
    EngineShare,
    RolloutEngine,
    SamplingSettings,
    Scores,
    Take,
)
from megatron_opsft.rollout.limits import check_engine_ranks
from megatron_opsft.rollout.requests import Decoder, ResponseRequest, make_rollouts
from megatron_opsft.rollout.vllm.options import sampling_params, start_llm
from megatron_opsft.rollout.vllm.weights import DraftWeights, vllm_layout
from megatron_opsft.runtime.phase import count_done, count_tokens

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.logprobs import Logprob
    from vllm.v1.metrics import reader
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as SecondRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as FirstRunner
    from vllm.v1.worker.gpu_worker import Worker

_SPEC_COUNTS = {
    "drafts": "vllm:spec_decode_num_drafts",
    "draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}


class VllmEngine(RolloutEngine):
    """vLLM's `LLM`, started with random weights: the first update brings the real ones.

    Every `tp` consecutive ranks are one engine; they make the same calls in the same order.
    """

    def __init__(
        self, settings: EngineSettings, table: WeightTable, tokenizer: Decoder
    ) -> None:
        """Start vLLM. Called by every rank, after the job's process groups were made.

        Errors: `UserError` if rollout.tp does not divide the world, or vLLM refuses the model.
        """
        check_engine_ranks(settings.tp, settings.world_size)
        self.version = None
        self.tokenizer = tokenizer
        self.layout = vllm_layout(table, settings.tp, settings.rank % settings.tp)
        shapes = table.hf_shapes()
        # Those in the files of the model, whether these stack experts or not.
        self._hf_names = shapes.keys() | stacked(shapes).keys()
        self.share = EngineShare(
            index=settings.rank // settings.tp,
            count=settings.world_size // settings.tp,
            num_ranks=settings.tp,
            answers=self.layout.tp_rank == 0,
        )
        self._settings = settings
        # What is not on the GPU, by vLLM's tags.
        self._asleep: set[str] = set()
        self._llm = start_llm(settings, table)
        # Under the external launcher this process has one worker, and can call it. It must not be
        # in a local variable: vLLM stores an exception from its import, whose traceback keeps the
        # variables of this call alive, and the worker's memory would outlive `close`.
        self._worker: Worker = self._llm.collective_rpc(lambda wrapper: wrapper.worker)[
            0
        ]
        self._draft: DraftWeights | None = None
        if settings.speculative is not None:
            if not settings.is_cuda:
                from megatron_opsft.rollout.vllm.cpu import correct_expansion

                correct_expansion()
            draft = self._runner.get_draft_model()
            if draft is not None:
                self._draft = DraftWeights(draft, self._runner.get_model())

    @property
    def _runner(self) -> "FirstRunner | SecondRunner":
        """vLLM's runner of the model; vLLM chooses one of two classes."""
        return self._worker.model_runner

    def stream(self, take: Take, sampling: SamplingSettings) -> Iterator[list[Rollout]]:
        """See `RolloutEngine.stream`. Requests are taken as soon as the batch has room for them, so
        it stays full.

        The cache starts empty, so the responses depend only on the weights and on this call's
        requests.
        """
        if self.version is None:
            raise RuntimeError("the rollout engine holds no complete set of weights")
        from vllm.utils.torch_utils import set_random_seed

        self._drop_cache()
        names = count()
        running: dict[str, ResponseRequest] = {}
        has_more = True  # until `take` returns nothing
        while has_more or running:
            room = self._settings.batch_size - len(running)
            if has_more and room:
                requests = take(room)
                has_more = bool(requests)
                for request in requests:
                    name = str(next(names))
                    # The first request seeds the one stream of random numbers.
                    if name == "0" and not sampling.seeded:
                        # All ranks of an engine draw the same, and no two engines do.
                        set_random_seed(request.seed % 2**32)
                    running[name] = request
                    self._add(
                        name,
                        request.prompt_ids,
                        sampling_params(sampling, request.seed),
                    )
                continue
            ended = self._step()
            requests = [running.pop(output.request_id) for output in ended]
            if not self.share.answers:
                ended, requests = [], []
            yield make_rollouts(
                requests,
                [output.outputs[0].token_ids for output in ended],
                end_token_ids=sampling.end_token_ids,
                tokenizer=self.tokenizer,
                version=self.version,
                routing=[_routing(output) for output in ended],
            )

    def score(self, samples: Sequence[Sample]) -> Scores:
        """See `RolloutEngine.score`."""
        from vllm import SamplingParams

        sequences = [(*sample.prompt_ids, *sample.response_ids) for sample in samples]
        # vLLM uses cached blocks, but not when it has to return log-probs of the prompt.
        (first,) = self._run(
            sequences[:1], SamplingParams(max_tokens=1, detokenize=False)
        )
        scoring = SamplingParams(max_tokens=1, detokenize=False, prompt_logprobs=0)
        log_probs, routing = [], []
        outputs = self._run(sequences, scoring)
        for sample, output in zip(samples, outputs, strict=True):
            # For each position, token id -> its log-prob.
            positions = cast("list[dict[int, Logprob]]", output.prompt_logprobs)
            response = positions[len(sample.prompt_ids) :]
            log_probs.append(
                tuple(
                    by_token[token].logprob
                    for by_token, token in zip(
                        response, sample.response_ids, strict=True
                    )
                )
            )
            experts = _routing(output, len(positions) - 1)
            if experts:
                routing.append(experts)
        return Scores(
            log_probs=tuple(log_probs),
            stale_tokens=first.num_cached_tokens or 0,
            routing=tuple(routing),
        )

    def _run(
        self, prompts: Sequence[Sequence[int]], params: "SamplingParams"
    ) -> "list[RequestOutput]":
        """Run some prompts, and return vLLM's outputs in their order."""
        for index, prompt in enumerate(prompts):
            self._add(str(index), prompt, params)
        outputs: list[RequestOutput] = []
        while len(outputs) < len(prompts):
            outputs += self._step()
        return sorted(outputs, key=lambda output: int(output.request_id))

    def _add(
        self, name: str, prompt_ids: Sequence[int], params: "SamplingParams"
    ) -> None:
        self._llm.llm_engine.add_request(
            name, {"prompt_token_ids": list(prompt_ids)}, params
        )

    def _step(self) -> "list[RequestOutput]":
        """Run one pass, and return the outputs that ended in it."""
        outputs = cast("list[RequestOutput]", self._llm.llm_engine.step())
        ended = [output for output in outputs if output.finished]
        count_tokens(sum(len(output.outputs[0].token_ids) for output in ended))
        count_done(len(ended))
        return ended

    def spec_counts(self) -> Counter[str]:
        """See `RolloutEngine.spec_counts`; all ranks of an engine count the same."""
        if self._settings.speculative is None or not self.share.answers:
            return Counter()
        metrics = cast("list[reader.Counter]", self._llm.get_metrics())
        counts = Counter[str]()
        for key, name in _SPEC_COUNTS.items():
            # Several metrics may have the same name.
            values = (metric.value for metric in metrics if metric.name == name)
            counts[key] = int(sum(values))
        return counts

    def copy_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """See `RolloutEngine.copy_weights`: vLLM's own update of a running model."""
        self._worker.reload_weights(weights_iterator=tensors)

    def copy_files(self, names_by_file: Mapping[Path, Collection[str]]) -> None:
        """See `RolloutEngine.copy_files`: vLLM's own readers and loaders do it."""
        from vllm.model_executor.model_loader import weight_utils

        dtype = getattr(torch, self._settings.dtype)

        def read() -> Iterator[tuple[str, Tensor]]:
            for file, names in names_by_file.items():
                tensors = weight_utils.safetensors_weights_iterator(
                    [str(file)], use_tqdm_on_load=False
                )
                for name, tensor in tensors:
                    if name in names and name in self._hf_names:
                        # vLLM keeps some parameters of every model in float32; the trainer has
                        # all of them in the model's dtype.
                        yield name, tensor.to(dtype)

        self.copy_weights(read())

    def begin_update(self) -> None:
        """See `RolloutEngine.begin_update`. The KV cache stays unmapped until the end."""
        self.version = None
        self._wake("weights")

    def finish_update(self, version: int) -> None:
        """See `RolloutEngine.finish_update`."""
        self._wake("kv_cache")
        self._drop_cache()
        self.version = version

    def _wake(self, tag: str) -> None:
        if tag in self._asleep:
            self._llm.wake_up(tags=[tag])
            self._asleep.remove(tag)

    def _drop_cache(self) -> None:
        """Forget the keys and values of all earlier requests."""
        if not self._llm.reset_prefix_cache():
            raise SyncError("vLLM did not drop its prefix cache")

    def weights(self) -> Mapping[str, Tensor]:
        """See `RolloutEngine.weights`."""
        return {name: p.data for name, p in self._runner.get_model().named_parameters()}

    def draft_fault(self) -> str:
        """See `RolloutEngine.draft_fault`."""
        fault = self._draft.fault() if self._draft is not None else ""
        if fault:
            fault = f"the draft model of rollout.speculative is not as it was loaded: {fault}"
        return fault

    def sleep(self) -> None:
        """See `RolloutEngine.sleep`; on a CPU nothing is freed."""
        if self._settings.is_cuda and not self._asleep:
            self.version = None
            self._llm.sleep(level=2)
            self._asleep = {"weights", "kv_cache"}

    def close(self) -> None:
        """Free the model. vLLM destroys its process groups, and with them those of the job."""
        from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

        self.version = None
        del self._draft, self._worker
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        # vLLM 0.32 keeps notes on each layer that it reloaded. They refer to the layer, which would
        # stay in memory until the process ends.
        LAYERWISE_INFO.clear()
        gc.collect()


def _routing(output: "RequestOutput", num_tokens: int | None = None) -> bytes:
    """Return the experts of the first `num_tokens`, in the format of `Sample.routing`.

    vLLM's array is [tokens - 1, layers, top_k].
    """
    experts = output.outputs[0].routed_experts
    return b"" if experts is None else experts[:num_tokens].astype("uint8").tobytes()
