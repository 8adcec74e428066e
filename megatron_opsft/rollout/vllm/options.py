"""How vLLM is started, and how it is asked to sample."""

import gc
import math
import os
import shutil
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from megatron_opsft.errors import UserError
from megatron_opsft.models.weights.rules import WeightTable
from megatron_opsft.rollout.engine import (
    JOB_ID_VARIABLE,
    EngineSettings,
    SamplingSettings,
)
from megatron_opsft.rollout.limits import check_installed
from megatron_opsft.runtime.console import describe_full_gpu
from megatron_opsft.runtime.libraries import collector_at_rest

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams

_CPU_WORKER = "megatron_opsft.rollout.vllm.cpu.LaunchedCpuWorker"
_CPU_BLOCK_TOKENS = (
    32  # prompts share whole blocks: vLLM's 128 would be longer than most prompts
)


def start_llm(settings: EngineSettings, table: WeightTable) -> "LLM":
    """vLLM's `LLM`. Errors: `UserError` for what vLLM refuses."""
    check_installed("vllm")
    if table.shape.moe and not settings.is_cuda:
        raise UserError(
            "rollout.engine=vllm: vLLM's CPU kernels keep a packed copy of the experts that no "
            "update of the weights reaches; on a CPU use rollout.engine=hf for a mixture of experts"
        )
    prepare_environment(settings.is_cuda, settings.rank, seeded=settings.seeded)
    with collector_at_rest(lasting=True):
        from vllm import LLM
    if not settings.is_cuda:
        from megatron_opsft.rollout.vllm import cpu

        cpu.keep_weights_plain()
    if settings.notes_routing and settings.tp > 1:
        _note_routing_on_every_rank()
    # vLLM collects garbage six times while it starts. All that is there by now stays, so it is
    # looked through once and then left alone, until vLLM lets go of it when it ends.
    gc.collect()
    gc.freeze()
    # The last three where the package of a method of `rollout.speculative`, or its draft model's
    # weights are missing.
    refusals: tuple[type[Exception], ...] = (ValueError, NotImplementedError)
    refused = "this model"
    if settings.speculative is not None:
        refusals += (ImportError, OSError, RuntimeError)
        refused += f" with rollout.speculative={dict(settings.speculative)}"
    try:
        return LLM(**llm_options(settings, table))
    except refusals as error:
        if describe_full_gpu(error):
            raise
        raise UserError(
            f"rollout.engine=vllm: vLLM refuses {refused}: {_reason(error)}"
        ) from error


def _note_routing_on_every_rank() -> None:
    """vLLM 0.32 hands the experts out on the first rank of an engine alone. Under the external
    launcher every rank has a scheduler, which stops where they are missing; all ranks chose alike.
    """
    from vllm.distributed.aux_output_connector import worker

    first: Any = SimpleNamespace(is_first_rank=True)
    worker.get_tp_group = lambda: first


def _reason(error: Exception) -> str:
    """In one line."""
    if isinstance(
        error, ValidationError
    ):  # its text has the input and an address as well
        said = [
            f"{'.'.join(map(str, e['loc']))} {e['msg']}".strip() for e in error.errors()
        ]
        return " ".join("; ".join(said).split())
    return " ".join(str(error).split())


def prepare_environment(is_cuda: bool, rank: int, *, seeded: bool) -> None:
    """Set what vLLM reads from the environment when it is imported or started.

    Errors: `UserError` where `seeded` is false and nothing compiles the sampler that this is for.
    """
    # In process: the worker's parameters are then ours to write, and scheduling is deterministic.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault(
        "VLLM_LOGGING_LEVEL", "ERROR"
    )  # its warnings are not for the user
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if is_cuda:
        # FlashInfer's sum over an engine's ranks comes in no fixed order, and is compiled by a CUDA
        # toolkit that may not be there.
        os.environ.setdefault("VLLM_ALLREDUCE_USE_FLASHINFER", "0")
    if is_cuda and seeded:
        # FlashInfer's sampler takes no batch with a request that carries a seed. vLLM's warm-up,
        # which has none, would still compile it with a CUDA toolkit that may not be there.
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    elif is_cuda and os.environ.get("VLLM_USE_FLASHINFER_SAMPLER") != "0":
        home = (
            os.environ.get("CUDA_HOME")
            or os.environ.get("CUDA_PATH")
            or "/usr/local/cuda"
        )
        if shutil.which("nvcc") is None and not os.path.isfile(f"{home}/bin/nvcc"):
            raise UserError(
                "rollout.seeded=false: FlashInfer compiles its sampler, and there is no nvcc; set "
                "CUDA_HOME to a CUDA toolkit, or rollout.seeded=true"
            )
    elif not is_cuda:
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
        "distributed_executor_backend": "external_launcher",  # each rank is one worker
    }
    if settings.speculative is not None:
        options["speculative_config"] = dict(settings.speculative)
        options["disable_log_stats"] = False  # they count its drafts
        if "model" in settings.speculative:
            # Not all proposers of vLLM 0.32 load a draft in another way than the policy.
            options["load_format"] = "auto"
            options["use_tqdm_on_load"] = False
            # In a level-2 sleep: after it a push brings the policy's weights alone.
            options["sleep_preserve_parameter_names"] = ["draft.*"]
    if settings.notes_routing:
        options["enable_return_routed_experts"] = True
        # Scheduled ahead, a pass of ended requests is left over, and vLLM 0.32 stops on it.
        options["async_scheduling"] = False
    if settings.is_cuda:
        options["gpu_memory_utilization"] = settings.gpu_memory_fraction
        options["kv_cache_memory_bytes"] = settings.kv_cache_bytes
        options["enable_sleep_mode"] = True
        options["compilation_config"] = {
            "pass_config": {"fuse_allreduce_rms": False}
        }  # FlashInfer
        if table.shape.moe:
            options["moe_backend"] = (
                "triton"  # FlashInfer's reorder the experts' weights
            )
        # CUDA graphs and NCCL's buffers leave the GPU, too.
        options["sleep_mode_offload_cudagraph"] = settings.deep_sleep
        options["enable_nccl_comm_suspend"] = settings.deep_sleep
    else:
        os.environ[JOB_ID_VARIABLE] = settings.job_id
        options["worker_cls"] = _CPU_WORKER
        options["enforce_eager"] = True
        options["block_size"] = _CPU_BLOCK_TOKENS
        options["kv_cache_memory_bytes"] = settings.kv_cache_bytes or _cpu_cache(
            settings, table
        )
        # A prompt that is prefilled in parts has its random generator wound back, which generators
        # on a CPU cannot.
        options["enable_chunked_prefill"] = False
        options["max_num_batched_tokens"] = max(settings.max_tokens, 8192)
    return options


def _cpu_cache(settings: EngineSettings, table: WeightTable) -> int:
    """Bytes of keys and values for a full batch, at most a quarter of the machine's memory."""
    shape = table.shape
    itemsize = 4 if settings.dtype == "float32" else 2
    # A draft model is no larger than the policy.
    num_layers = shape.num_layers * (
        2 if "model" in (settings.speculative or {}) else 1
    )
    per_token = 2 * num_layers * shape.num_kv_heads * shape.head_dim * itemsize
    tokens = -(-settings.max_tokens // _CPU_BLOCK_TOKENS) * _CPU_BLOCK_TOKENS
    wanted = per_token * tokens * (settings.batch_size + 1)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(min(wanted, memory // 4), 2**24)


def sampling_params(sampling: SamplingSettings, seed: int) -> "SamplingParams":
    """vLLM's `SamplingParams` for one response."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        output_kind=RequestOutputKind.FINAL_ONLY,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_tokens=sampling.max_response_tokens,
        seed=seed if sampling.seeded else None,
        stop_token_ids=list(sampling.end_token_ids),
        ignore_eos=True,  # the end tokens are ours, not those of the model's files
        detokenize=False,
    )
