"""One vLLM engine in this process: starting it, sampling and scoring with token ids.

With `worker` and `cpu_worker` the only file that names vllm. `engine` puts it inside the training
ranks, `remote.process` into a process of its own.
"""

import gc
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import count
from typing import Any

from torch import Tensor

from megatron_opsft.errors import SyncError, UserError
from megatron_opsft.records import Sample
from megatron_opsft.rollout.engine import (
    Checksums,
    EngineLayout,
    EngineSettings,
    PromptRequest,
    SamplingSettings,
    Scores,
    Take,
    single_requests,
)
from megatron_opsft.rollout.traits import check_installed
from megatron_opsft.weights.layouts import Parameter, hf_columns
from megatron_opsft.weights.rules import EMBEDDING, TIED_HEAD, WeightTable
from megatron_opsft.weights.vllm_layout import tied_head, vllm_parameters

_WORKER = "megatron_opsft.rollout.vllm.worker"
_CPU_WORKER = "megatron_opsft.rollout.vllm.cpu_worker.LaunchedCpuWorker"
JOB_ID_VARIABLE = "MEGATRON_OPSFT_JOB_ID"
_CPU_BLOCK_TOKENS = 32  # prompts share whole blocks: vLLM's 128 would be longer than most prompts


class VllmCore:
    """vLLM's `LLM`, started with random weights: the first update brings the real ones.

    The ranks of a tensor-parallel group make the same calls in the same order.
    """

    def __init__(self, settings: EngineSettings, table: WeightTable, rank: int = 0) -> None:
        """rank: of this process in its job. Errors: `UserError` for what vLLM refuses."""
        check_installed("vllm")
        if table.shape.moe and not settings.is_cuda:
            raise UserError(
                "rollout.engine=vllm: vLLM's CPU kernels keep a packed copy of the experts that no "
                "update of the weights reaches; on a CPU use rollout.engine=hf for a mixture of "
                "experts"
            )
        _prepare_environment(settings.is_cuda, rank)
        from vllm import LLM

        try:
            self.llm = LLM(**_options(settings, table))
        except (ValueError, NotImplementedError) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"rollout.engine=vllm: vLLM refuses this model: {reason}") from error
        vocab_size = self.llm.model_config.get_vocab_size()
        if vocab_size != table.shape.vocab_size:
            raise UserError(
                f"rollout.engine=vllm: the engine's vocabulary has {vocab_size} tokens, the "
                f"trainer's {table.shape.vocab_size}"
            )
        # The same on every worker.
        self.packs, self.packs_head = self.rpc("opsft_packs")[0]
        self.layout = vllm_layout(table, settings.tp, packed_head=self.packs_head)
        self._batch_size = settings.batch_size

    def rpc(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """A method of every worker of this process's engine; their results."""
        return self.llm.collective_rpc(method, args=args, kwargs=kwargs)

    def sample(
        self,
        prompts: Sequence[PromptRequest],
        sampling: SamplingSettings,
        beat: Callable[[], None] = lambda: None,
    ) -> list[list[int]]:
        """Token ids of all responses, in the order of the prompts and of their samples.

        beat: called after every decoding step. The cache starts empty, so what comes out depends
        on the weights and on this call's requests alone.
        """
        self.drop_cache()
        outputs = self._run(
            [(p.prompt_ids, _sampling_params(sampling, s)) for p in prompts for s in p.seeds], beat
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    def stream(
        self, take: Take, sampling: SamplingSettings
    ) -> Iterator[list[tuple[PromptRequest, list[int]]]]:
        """After each decoding step the responses that ended in it: requests of one, token ids.

        Work is taken as soon as there is room in the batch, so that the batch stays full.
        """
        self.drop_cache()
        engine = self.llm.llm_engine
        names = count()
        running: dict[str, PromptRequest] = {}
        more = True
        while more or running:
            if more and len(running) < self._batch_size:
                singles = single_requests(take(self._batch_size - len(running)))
                more = bool(singles)
                for single in singles:
                    name = f"stream-{next(names)}"
                    running[name] = single
                    engine.add_request(
                        name,
                        {"prompt_token_ids": list(single.prompt_ids)},
                        _sampling_params(sampling, single.seeds[0], only_final=True),
                    )
                continue
            ended = [output for output in engine.step() if output.finished]
            yield [
                (running.pop(output.request_id), list(output.outputs[0].token_ids))
                for output in ended
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

    def checksums(self, cuts: int) -> Checksums:
        """See `RolloutEngine.checksums`: of the workers of this process's engine."""
        parameters = [self.layout.parameters_of(n) for n in range(self.layout.tp_size)]
        of_rank = dict(self.rpc("opsft_checksums", parameters, self.layout.hf_columns, cuts))
        return Checksums(of_rank=of_rank, signed_zeros=not self.packs)

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

    def _run(
        self,
        requests: Sequence[tuple[Sequence[int], Any]],
        beat: Callable[[], None] = lambda: None,
    ) -> list[Any]:
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
            outputs += [output for output in engine.step() if output.finished]
            beat()
        return sorted(outputs, key=lambda output: int(output.request_id))


def _prepare_environment(is_cuda: bool, rank: int) -> None:
    """What vLLM reads from the environment when it is imported or started."""
    # In process: the worker's parameters are then ours to write, and scheduling is deterministic.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its warnings are not for the user
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if not is_cuda:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    for name in ("RANK", "LOCAL_RANK"):  # torchrun has set them
        os.environ.setdefault(name, str(rank))


def _options(settings: EngineSettings, table: WeightTable) -> dict[str, Any]:
    options: dict[str, Any] = {
        "model": str(settings.model_dir),
        "dtype": settings.dtype,
        "tensor_parallel_size": settings.tp,
        "max_model_len": settings.max_tokens,
        "max_num_seqs": settings.batch_size,
        "enable_prefix_caching": True,
        "seed": settings.seed,
        "load_format": "dummy",
        "skip_tokenizer_init": True,  # token ids in, token ids out
        "generation_config": "vllm",
        "disable_log_stats": True,
        "distributed_timeout_seconds": math.ceil(60 * settings.collective_minutes),
        "cpu_distributed_timeout_seconds": math.ceil(60 * settings.collective_minutes),
        "worker_extension_cls": f"{_WORKER}.OpsftWorker",
    }
    if settings.under_launcher:
        options["distributed_executor_backend"] = "external_launcher"
        if not settings.is_cuda:
            os.environ[JOB_ID_VARIABLE] = settings.job_id
            options["worker_cls"] = _CPU_WORKER
    else:
        from vllm.config import WeightTransferConfig

        from megatron_opsft.rollout.vllm.worker import BACKEND

        options["weight_transfer_config"] = WeightTransferConfig(backend=BACKEND)
    if settings.is_cuda:
        options["gpu_memory_utilization"] = settings.gpu_memory_fraction
        options["kv_cache_memory_bytes"] = settings.kv_cache_bytes
        options["enable_sleep_mode"] = settings.under_launcher
    else:
        options["enforce_eager"] = True
        options["block_size"] = _CPU_BLOCK_TOKENS
        options["kv_cache_memory_bytes"] = settings.kv_cache_bytes or _cpu_cache(settings, table)
        # A prompt that is prefilled in parts has its random generator wound back, which generators
        # on a CPU cannot.
        options["enable_chunked_prefill"] = False
        options["max_num_batched_tokens"] = max(settings.max_tokens, 8192)
    return options


def _cpu_cache(settings: EngineSettings, table: WeightTable) -> int:
    """Bytes of keys and values for a full batch, at most a quarter of the machine's memory."""
    shape = table.shape
    itemsize = 4 if settings.dtype == "float32" else 2
    per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * itemsize
    tokens = -(-settings.max_tokens // _CPU_BLOCK_TOKENS) * _CPU_BLOCK_TOKENS
    wanted = per_token * tokens * (settings.batch_size + 1)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(min(wanted, memory // 4), 2**24)


def _sampling_params(sampling: SamplingSettings, seed: int, *, only_final: bool = False) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    kind = RequestOutputKind.FINAL_ONLY if only_final else RequestOutputKind.CUMULATIVE
    return SamplingParams(
        output_kind=kind,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_tokens=sampling.max_response_tokens,
        seed=seed,
        stop_token_ids=list(sampling.end_token_ids),
        ignore_eos=True,  # the end tokens are ours, not those of the model's files
        detokenize=False,
    )


def vllm_layout(table: WeightTable, tp_size: int, *, packed_head: bool) -> EngineLayout:
    """vLLM's layout of a model. packed_head: the head's product has a copy of a tied embedding.

    Errors: `UserError` when tp_size does not divide the model.
    """

    @cache  # every push asks
    def parameters_of(tp_rank: int) -> tuple[Parameter, ...]:
        parameters = vllm_parameters(table, tp_rank, tp_size)
        if packed_head and table.shape.tied_embeddings:
            parameters = (*parameters, tied_head(parameters))
        return parameters

    names = [parameter.name for parameter in parameters_of(0)]
    return EngineLayout(
        tp_size=tp_size,
        parameters_of=parameters_of,
        hf_columns=hf_columns(table.hf_shapes()),
        uncertain=frozenset(name for name in names if ".experts." in name),
    )


def checked_stream(
    tensors: Iterable[tuple[str, Tensor]], layout: EngineLayout
) -> Iterator[tuple[str, Tensor]]:
    """The stream as vLLM needs it: a tied embedding comes under the head's name as well.

    Errors: ValueError for a name that is unknown, comes twice, or is missing at the end.
    """
    missing = dict.fromkeys(layout.hf_columns)
    embedding = EMBEDDING.hf_tensors[0][0]
    for name, tensor in tensors:
        if name not in missing:
            known = "was sent twice" if name in layout.hf_columns else "is unknown to the engine"
            raise ValueError(f"{name} {known}")
        del missing[name]
        yield name, tensor
        if name == embedding and TIED_HEAD not in layout.hf_columns:
            yield TIED_HEAD, tensor
    if missing:
        raise ValueError(f"{len(missing)} weights were not sent: {', '.join(list(missing)[:5])}")
