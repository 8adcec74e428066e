"""One vLLM engine in this process: starting it, sampling and scoring with token ids.

With `options` and what runs in the workers the only file that names vllm.
"""

import gc
import logging
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from pydantic import ValidationError

from megatron_opsft.errors import SyncError, UserError
from megatron_opsft.records import Sample
from megatron_opsft.rollout.engine import (
    Checksums,
    EngineSettings,
    SamplingSettings,
    Scores,
    SpecCounts,
    Take,
)
from megatron_opsft.rollout.requests import ResponseRequest
from megatron_opsft.rollout.traits import check_installed
from megatron_opsft.rollout.vllm.layout import vllm_layout
from megatron_opsft.rollout.vllm.options import llm_options, prepare_environment, sampling_params
from megatron_opsft.rollout.vllm.spec_counters import SpecCounters
from megatron_opsft.runtime.loading import collector_at_rest
from megatron_opsft.runtime.phase import count_done, count_tokens
from megatron_opsft.weights.rules import WeightTable

_log = logging.getLogger(__name__)


class VllmCore:
    """vLLM's `LLM`, started with random weights: the first update brings the real ones.

    The ranks of a tensor-parallel group make the same calls in the same order.
    """

    def __init__(self, settings: EngineSettings, table: WeightTable, rank: int) -> None:
        """rank: of this process in its job. Errors: `UserError` for what vLLM refuses."""
        check_installed("vllm")
        if table.shape.moe and not settings.is_cuda:
            raise UserError(
                "rollout.engine=vllm: vLLM's CPU kernels keep a packed copy of the experts that no "
                "update of the weights reaches; on a CPU use rollout.engine=hf for a mixture of "
                "experts"
            )
        prepare_environment(settings.is_cuda, rank)
        with collector_at_rest():
            from vllm import LLM
        # vLLM collects garbage six times while it starts. All that is there by now stays, so it is
        # looked through once and then left alone, until vLLM lets go of it when it ends.
        gc.collect()
        gc.freeze()
        try:
            self.llm = LLM(**llm_options(settings, table))
        except _refusals(settings) as error:
            refused = "this model"
            if settings.speculative is not None:
                refused += f" with rollout.speculative={dict(settings.speculative)}"
            raise UserError(
                f"rollout.engine=vllm: vLLM refuses {refused}: {_reason(error)}"
            ) from error
        vocab_size = self.llm.model_config.get_vocab_size()
        if vocab_size != table.shape.vocab_size:
            raise UserError(
                f"rollout.engine=vllm: the engine's vocabulary has {vocab_size} tokens, the "
                f"trainer's {table.shape.vocab_size}"
            )
        # The same on every worker.
        self.packs, self.packs_head = self.rpc("opsft_packs")[0]
        self.layout = vllm_layout(table, settings.tp, packed_head=self.packs_head)
        self.batch_size = settings.batch_size
        self._spec_counters: SpecCounters | None = None
        self._has_draft = False
        if settings.speculative is not None:
            self._open_speculative(rank)

    def _open_speculative(self, rank: int) -> None:
        self._spec_counters = SpecCounters(self.llm.get_metrics)
        self._has_draft = any(self.rpc("opsft_open_speculative"))
        if rank == 0:
            _log.info(
                "rollout.speculative keeps the distribution of responses, not each response: their "
                "random numbers then depend on earlier drafts, so a run that resumes or is "
                "repeated may sample other responses"
            )

    def rpc(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """A method of every worker of this process's engine; their results."""
        return self.llm.collective_rpc(method, args=args, kwargs=kwargs)

    def _reason(self, method: str, *args: Any) -> str:
        """The first reason that a worker gives against something; "" where none has one."""
        return next(filter(None, self.rpc(method, *args)), "")

    def stream(
        self, take: Take, sampling: SamplingSettings
    ) -> Iterator[list[tuple[ResponseRequest, list[int]]]]:
        """After each decoding step the responses that ended in it: requests, token ids.

        Work is taken as soon as there is room in the batch, so that the batch stays full.
        """
        self.drop_cache()
        engine = self.llm.llm_engine
        names = count()
        running: dict[str, ResponseRequest] = {}
        more = True
        while more or running:
            room = self.batch_size - len(running)
            if more and room:
                requests = take(room)
                more = bool(requests)
                for request in requests:
                    name = f"stream-{next(names)}"
                    running[name] = request
                    engine.add_request(
                        name,
                        {"prompt_token_ids": list(request.prompt_ids)},
                        sampling_params(sampling, request.seed, only_final=True),
                    )
                continue
            yield [
                (running.pop(output.request_id), list(output.outputs[0].token_ids))
                for output in _step(engine)
            ]

    def score(self, samples: Sequence[Sample]) -> Scores:
        """See `RolloutEngine.score`."""
        from vllm import SamplingParams

        whole = [(*sample.prompt_ids, *sample.response_ids) for sample in samples]
        # With log-probs of the prompt vLLM reads no cached blocks, without them it does.
        reading = SamplingParams(max_tokens=1, detokenize=False)
        (first,) = self._run([(whole[0], reading)])
        scoring = SamplingParams(max_tokens=1, detokenize=False, prompt_logprobs=0)
        outputs = self._run([(ids, scoring) for ids in whole])
        log_probs = []
        for sample, output in zip(samples, outputs, strict=True):
            rows = output.prompt_logprobs[len(sample.prompt_ids) :]
            ids = sample.response_ids
            log_probs.append(tuple(row[i].logprob for row, i in zip(rows, ids, strict=True)))
        return Scores(log_probs=tuple(log_probs), stale_tokens=first.num_cached_tokens or 0)

    def take_spec_counts(self) -> SpecCounts:
        """See `RolloutEngine.take_spec_counts`."""
        return SpecCounts() if self._spec_counters is None else self._spec_counters.take()

    def checksums(self, cuts: int) -> Checksums:
        """See `RolloutEngine.checksums`: of the workers of this process's engine."""
        parameters = [self.layout.parameters_of(n) for n in range(self.layout.tp_size)]
        of_rank = dict(self.rpc("opsft_checksums", parameters, self.layout.hf_columns, cuts))
        return Checksums(
            of_rank=of_rank, signed_zeros=not self.packs, draft_fault=self._draft_fault()
        )

    def _draft_fault(self) -> str:
        fault = self._reason("opsft_draft_fault") if self._has_draft else ""
        return fault and f"the draft model of rollout.speculative is not as it was loaded: {fault}"

    def drop_cache(self) -> None:
        """Forget the keys and values of all earlier requests."""
        if not self.llm.reset_prefix_cache():
            raise SyncError("vLLM did not drop its prefix cache")

    def close(self) -> None:
        """Drop the model and its memory, and with vLLM's process groups also the job's. Another
        engine can then be built in this process.
        """
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()

    def _run(self, requests: Sequence[tuple[Sequence[int], Any]]) -> list[Any]:
        """vLLM's outputs of (prompt, sampling parameters), in their order."""
        if not requests:
            return []
        self.llm.enqueue(
            [{"prompt_token_ids": list(ids)} for ids, _ in requests],
            [params for _, params in requests],
            use_tqdm=False,
        )
        engine = self.llm.llm_engine
        outputs: list[Any] = []
        while engine.has_unfinished_requests():
            outputs += _step(engine)
        return sorted(outputs, key=lambda output: int(output.request_id))


def _step(engine: Any) -> list[Any]:
    """The outputs that ended in one more pass of `LLMEngine`."""
    ended = [output for output in engine.step() if output.finished]
    count_tokens(sum(len(output.outputs[0].token_ids) for output in ended))
    count_done(len(ended))
    return ended


def _refusals(settings: EngineSettings) -> tuple[type[Exception], ...]:
    """What vLLM raises for what it does not take; the last three where the package of a method of
    `rollout.speculative`, or its draft model's weights are missing.
    """
    of_model = (ValueError, NotImplementedError)
    if settings.speculative is None:
        return of_model
    return (*of_model, ImportError, OSError, RuntimeError)


def _reason(error: Exception) -> str:
    """In one line."""
    if isinstance(error, ValidationError):  # its text has the input and an address as well
        said = [f"{'.'.join(map(str, e['loc']))} {e['msg']}".strip() for e in error.errors()]
        return " ".join("; ".join(said).split())
    return " ".join(str(error).split())
