"""What vLLM is started with, and how it is asked to sample."""

import math
import os
from pathlib import Path
from typing import Any

from megatron_opsft.rollout.draft_files import check_draft
from megatron_opsft.rollout.engine import EngineSettings, SamplingSettings
from megatron_opsft.rollout.vllm.proposer import MAX_VLLM_DRAFT, PROPOSERS
from megatron_opsft.weights.rules import WeightTable

_WORKER = "megatron_opsft.rollout.vllm.worker"
_CPU_WORKER = "megatron_opsft.rollout.vllm.cpu_worker.LaunchedCpuWorker"
JOB_ID_VARIABLE = "MEGATRON_OPSFT_JOB_ID"
_CPU_BLOCK_TOKENS = 32  # prompts share whole blocks: vLLM's 128 would be longer than most prompts


def prepare_environment(is_cuda: bool, rank: int) -> None:
    """Set what vLLM reads from the environment when it is imported or started."""
    # In process: the worker's parameters are then ours to write, and scheduling is deterministic.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its warnings are not for the user
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if is_cuda:
        # FlashInfer's sampler takes no batch with a request that carries a seed, and each of ours
        # does (`sampling_params`). vLLM's warm-up, which has none, would still compile it with a
        # CUDA toolkit that may not be there.
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    else:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    for name in ("RANK", "LOCAL_RANK"):  # torchrun has set them
        os.environ.setdefault(name, str(rank))


def llm_options(settings: EngineSettings, table: WeightTable) -> dict[str, Any]:
    """The arguments of vLLM's `LLM`."""
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
        "distributed_executor_backend": "external_launcher",  # each rank is one worker
    }
    if settings.speculation != "off":
        options["speculative_config"] = {
            "method": "custom_class",
            "model": PROPOSERS[settings.speculation],
            "num_speculative_tokens": MAX_VLLM_DRAFT,
        }
    if settings.draft_model is not None:
        options["speculative_config"] = _draft_options(settings.draft_model, settings, table)
        options["disable_log_stats"] = False  # they count its drafts
        # Of a level-2 sleep, after which a push brings the model's weights alone.
        options["sleep_preserve_parameter_names"] = ["draft.*"]
    if settings.is_cuda:
        options["gpu_memory_utilization"] = settings.gpu_memory_fraction
        options["kv_cache_memory_bytes"] = settings.kv_cache_bytes
        options["enable_sleep_mode"] = True
    else:
        os.environ[JOB_ID_VARIABLE] = settings.job_id
        options["worker_cls"] = _CPU_WORKER
        options["enforce_eager"] = True
        options["block_size"] = _CPU_BLOCK_TOKENS
        options["kv_cache_memory_bytes"] = settings.kv_cache_bytes or _cpu_cache(settings, table)
        # A prompt that is prefilled in parts has its random generator wound back, which generators
        # on a CPU cannot.
        options["enable_chunked_prefill"] = False
        options["max_num_batched_tokens"] = max(settings.max_tokens, 8192)
    return options


def _draft_options(directory: Path, settings: EngineSettings, table: WeightTable) -> dict[str, Any]:
    """vLLM's `speculative_config` for a draft model. Errors: see `check_draft`."""
    from vllm.config import LoadConfig

    return {
        "method": check_draft(directory, table.shape),
        "model": str(directory),
        "num_speculative_tokens": settings.draft_tokens,
        "draft_tensor_parallel_size": settings.tp,
        "draft_load_config": LoadConfig(load_format="auto"),  # not random ones, as the model's
    }


def _cpu_cache(settings: EngineSettings, table: WeightTable) -> int:
    """Bytes of keys and values for a full batch, at most a quarter of the machine's memory."""
    shape = table.shape
    itemsize = 4 if settings.dtype == "float32" else 2
    num_layers = shape.num_layers + (settings.draft_model is not None)  # an EAGLE head has one
    per_token = 2 * num_layers * shape.num_kv_heads * shape.head_dim * itemsize
    tokens = -(-settings.max_tokens // _CPU_BLOCK_TOKENS) * _CPU_BLOCK_TOKENS
    wanted = per_token * tokens * (settings.batch_size + 1)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(min(wanted, memory // 4), 2**24)


def sampling_params(sampling: SamplingSettings, seed: int, *, only_final: bool = False) -> Any:
    """vLLM's `SamplingParams`; only_final: no output before the response has ended."""
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
