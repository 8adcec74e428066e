"""Start vLLM, and make its sampling parameters."""

import gc
import math
import os
import shutil
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from megatron_opsft.errors import UserError
from megatron_opsft.models.architectures.shape import ModelShape, state_bytes
from megatron_opsft.models.architectures.template import Architecture
from megatron_opsft.models.weights.rules import WeightTable
from megatron_opsft.rollout.engine import (
    JOB_ID_VARIABLE,
    EngineSettings,
    SamplingSettings,
)
from megatron_opsft.rollout.limits import check_installed
from megatron_opsft.runtime.console import describe_full_gpu
from megatron_opsft.runtime.libraries import collector_at_rest
from megatron_opsft.runtime.rounding import ceil_div, round_up

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams

_CPU_WORKER = "megatron_opsft.rollout.vllm.cpu.LaunchedCpuWorker"
# Prompts share whole blocks: vLLM's 128 would be longer than most prompts.
_CPU_BLOCK_TOKENS = 32
# What the kernels for CPUs have: numbers of an attention head, of a gated delta net's heads.
_CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
_CPU_DELTA_HEADS = (64, 128)
_CPU_CONV_SIZE = 4


def start_llm(settings: EngineSettings, table: WeightTable) -> "LLM":
    """Start vLLM's `LLM`. Errors: `UserError` for a model or setting that vLLM refuses."""
    check_installed("vllm")
    if not settings.is_cuda:
        check_cpu_kernels(table.shape, settings.dtype)
    if table.shape.delta is not None and settings.speculative is not None:
        raise UserError(
            "rollout.speculative is not supported for a model with gated delta nets; set "
            "rollout.speculative=null"
        )
    prepare_vllm_environment(settings.is_cuda, settings.rank, seeded=settings.seeded)
    with collector_at_rest(lasting=True):
        from vllm import LLM
    if not settings.is_cuda:
        from megatron_opsft.rollout.vllm import cpu

        cpu.keep_weights_plain()
        if table.shape.delta is not None:
            cpu.keep_convolutions_plain()
            cpu.register_hybrid(_language_model(table.architecture))
    if settings.notes_routing and settings.tp > 1:
        _note_routing_on_every_rank()
    # vLLM collects garbage six times while it starts. All objects that exist by now will stay, so
    # the collector looks at them once more and then ignores them, until vLLM unfreezes them when it
    # ends.
    gc.collect()
    gc.freeze()
    refusals: tuple[type[Exception], ...] = (ValueError, NotImplementedError)
    refused = "this model"
    if settings.speculative is not None:
        # The package of a method, or the draft model's weights, may be missing.
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


def check_cpu_kernels(shape: ModelShape, dtype: str) -> None:
    """Check that vLLM's kernels for CPUs can compute this model. Errors: `UserError`.

    vLLM itself would start, and fail in the first step.
    """
    if shape.moe is not None:
        raise UserError(
            "rollout.engine=vllm: vLLM's CPU kernels keep a packed copy of the experts that no "
            "update of the weights reaches; on a CPU use rollout.engine=hf for a mixture of experts"
        )
    if shape.delta is None:
        return
    if dtype != "bfloat16":
        raise UserError(
            "rollout.engine=vllm: vLLM's CPU kernels compute gated delta nets only in bfloat16, "
            f"not in {dtype}; set model.dtype=bfloat16, or rollout.engine=hf"
        )
    delta = shape.delta
    refused = ""
    if shape.head_dim not in _CPU_HEADS:
        refused = f"head_dim={shape.head_dim}, only {_CPU_HEADS}"
    elif delta.key_head_dim != delta.value_head_dim:
        refused = (
            f"linear_key_head_dim={delta.key_head_dim} other than "
            f"linear_value_head_dim={delta.value_head_dim}"
        )
    elif delta.key_head_dim not in _CPU_DELTA_HEADS:
        refused = f"linear_key_head_dim={delta.key_head_dim}, only {_CPU_DELTA_HEADS}"
    elif delta.conv_size != _CPU_CONV_SIZE:
        refused = f"linear_conv_kernel_dim={delta.conv_size}, only {_CPU_CONV_SIZE}"
    if refused:
        raise UserError(
            f"rollout.engine=vllm: vLLM's CPU kernels do not support {refused}; on a CPU use "
            "rollout.engine=hf for this model"
        )


def _language_model(architecture: Architecture) -> str:
    """Return vLLM's class for a language model, or for that inside a model that also sees."""
    return architecture.hf_name.replace("ForConditionalGeneration", "ForCausalLM")


def _note_routing_on_every_rank() -> None:
    """Make vLLM 0.32 return the experts on every rank, not only on the first rank of an engine.

    Under the external launcher every rank has a scheduler, which stops if they are missing. All
    ranks choose the same experts.
    """
    from vllm.distributed.aux_output_connector import worker

    first: Any = SimpleNamespace(is_first_rank=True)
    worker.get_tp_group = lambda: first


def _reason(error: Exception) -> str:
    """Return the message of an error in one line."""
    message = str(error)
    if isinstance(error, ValidationError):  # its text also has the input and an address
        lines = []
        for detail in error.errors():
            location = ".".join(map(str, detail["loc"]))
            lines.append(f"{location} {detail['msg']}".strip())
        message = "; ".join(lines)
    return " ".join(message.split())


def prepare_vllm_environment(is_cuda: bool, rank: int, *, seeded: bool) -> None:
    """Set the environment variables that vLLM reads when it is imported or started.

    Errors: `UserError` if `seeded` is false and the sampler that this allows cannot be compiled.
    """
    # In this process, the worker's parameters can be written, and scheduling is deterministic.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    defaults = {
        "VLLM_LOGGING_LEVEL": "ERROR",  # its warnings are not for the user
        "VLLM_NO_USAGE_STATS": "1",
        "RANK": str(rank),  # torchrun has set these two already
        "LOCAL_RANK": str(rank),
    }
    if not is_cuda:
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        defaults["TORCH_COMPILE_DISABLE"] = "1"
    else:
        # FlashInfer's sum over an engine's ranks has no fixed order, and needs a CUDA toolkit to
        # compile, which may be missing.
        defaults["VLLM_ALLREDUCE_USE_FLASHINFER"] = "0"
        if seeded:
            # FlashInfer's sampler takes no batch that has a request with a seed. vLLM's warm-up,
            # which has none, would still compile it with a CUDA toolkit, which may be missing.
            defaults["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
        elif os.environ.get("VLLM_USE_FLASHINFER_SAMPLER") != "0":
            _check_nvcc()
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _check_nvcc() -> None:
    """Check that FlashInfer can compile its sampler. Errors: `UserError`."""
    home = (
        os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    )
    if shutil.which("nvcc") is None and not os.path.isfile(f"{home}/bin/nvcc"):
        raise UserError(
            "rollout.seeded=false: FlashInfer compiles its sampler, and there is no nvcc; set "
            "CUDA_HOME to a CUDA toolkit, or rollout.seeded=true"
        )


def llm_options(settings: EngineSettings, table: WeightTable) -> dict[str, Any]:
    """Return the arguments of vLLM's `LLM`."""
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
    if table.shape.delta is not None:
        options |= _hybrid_options(settings, table.architecture)
    if settings.speculative is not None:
        options["speculative_config"] = dict(settings.speculative)
        options["disable_log_stats"] = False  # these statistics count the drafts
        if "model" in settings.speculative:
            options |= {
                # Some proposers of vLLM 0.32 load the draft with the load format of the policy.
                "load_format": "auto",
                "use_tqdm_on_load": False,
                # Kept in a level-2 sleep: the sync after it only brings the policy's weights.
                "sleep_preserve_parameter_names": ["draft.*"],
            }
    if settings.notes_routing:
        options["enable_return_routed_experts"] = True
        # With asynchronous scheduling vLLM 0.32 stops on a last pass over ended requests.
        options["async_scheduling"] = False
    if settings.is_cuda:
        options |= {
            "gpu_memory_utilization": settings.gpu_memory_fraction,
            "kv_cache_memory_bytes": settings.kv_cache_bytes,
            "enable_sleep_mode": True,
            # The fused operation is FlashInfer's.
            "compilation_config": {"pass_config": {"fuse_allreduce_rms": False}},
            # In a deep sleep, CUDA graphs and NCCL's buffers leave the GPU, too.
            "sleep_mode_offload_cudagraph": settings.deep_sleep,
            "enable_nccl_comm_suspend": settings.deep_sleep,
        }
        if table.shape.moe:
            # FlashInfer's backends reorder the experts' weights.
            options["moe_backend"] = "triton"
    else:
        options |= _cpu_options(settings, table)
    return options


def _hybrid_options(
    settings: EngineSettings, architecture: Architecture
) -> dict[str, Any]:
    """Return what is different for a model with gated delta nets."""
    options: dict[str, Any] = {
        # A state is kept only at the ends of blocks, which are longer than most prompts, and in
        # prompts that are prefilled in chunks. vLLM notes experts only with the cache.
        "enable_prefix_caching": settings.notes_routing,
        # Unless told so, vLLM may round the states to the model's dtype after each token.
        "mamba_ssm_cache_dtype": "float32",
        "hf_overrides": {"architectures": [_language_model(architecture)]},
    }
    if settings.is_cuda:
        # FlashInfer's kernel is compiled with a CUDA toolkit, which may be missing.
        options["gdn_prefill_backend"] = "triton"
    return options


def _cpu_options(settings: EngineSettings, table: WeightTable) -> dict[str, Any]:
    os.environ[JOB_ID_VARIABLE] = settings.job_id
    return {
        "worker_cls": _CPU_WORKER,
        "enforce_eager": True,
        "block_size": _CPU_BLOCK_TOKENS,
        "kv_cache_memory_bytes": settings.kv_cache_bytes or _cpu_cache(settings, table),
        # vLLM rewinds the random generator of a prompt that is prefilled in several chunks, which
        # generators on a CPU do not support.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(settings.max_tokens, 8192),
    }


def _cpu_cache(settings: EngineSettings, table: WeightTable) -> int:
    """Return the bytes of keys, values and states for a full batch, at most a quarter of the
    machine's memory.
    """
    shape = table.shape
    itemsize = 4 if settings.dtype == "float32" else 2
    num_layers = shape.num_attention_layers
    if settings.speculative is not None and "model" in settings.speculative:
        num_layers *= 2  # a draft model is not larger than the policy
    layer_bytes = 2 * shape.num_kv_heads * shape.head_dim * itemsize  # of a token
    block_tokens = _CPU_BLOCK_TOKENS
    if shape.num_delta_layers:
        # vLLM makes blocks so long that a layer's state takes as much memory as a block.
        state = state_bytes(shape, itemsize) // shape.num_delta_layers
        block_tokens = round_up(ceil_div(state, layer_bytes), block_tokens)
    num_blocks = num_layers * ceil_div(settings.max_tokens, block_tokens)
    num_blocks += shape.num_delta_layers
    block_bytes = block_tokens * layer_bytes
    cache_bytes = num_blocks * block_bytes * (settings.batch_size + 1)
    machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(min(cache_bytes, machine_bytes // 4), 2**24)


def sampling_params(sampling: SamplingSettings, seed: int) -> "SamplingParams":
    """Make vLLM's `SamplingParams` for one response."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        output_kind=RequestOutputKind.FINAL_ONLY,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_tokens=sampling.max_response_tokens,
        seed=seed if sampling.seeded else None,
        stop_token_ids=list(sampling.end_token_ids),
        ignore_eos=True,  # the end tokens come from `sampling`, not from the model's files
        detokenize=False,
    )
