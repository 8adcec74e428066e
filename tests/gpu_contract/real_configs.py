"""What the shipped configurations become in the classes of vLLM and Megatron, on a pretended GPU.

Prints JSON: case -> what was read back; of a pair, the second is what it must be.
Usage: python real_configs.py vllm|megatron|deterministic
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from pretend_cuda import pretend, pretend_to_vllm

from megatron_opsft.architectures.config_from_hf import read_model_shape
from megatron_opsft.config import Config
from megatron_opsft.config.load import load_config
from megatron_opsft.plan.assumptions import load_hardware
from megatron_opsft.rollout.limits import max_engine_tokens
from megatron_opsft.runtime.device import Device, prepare_environment
from megatron_opsft.runtime.distributed import Layout
from megatron_opsft.storage.model_paths import resolve_config
from megatron_opsft.weights.rules import WeightTable

CONFIGS = sorted((Path(__file__).parents[2] / "examples/configs").glob("*.yaml"))
ENGINES = {
    "tp 1": [],
    "tp 2": ["rollout.tp=2"],
    "cache": ["rollout.kv_cache_bytes=4000000000", "rollout.deep_sleep=false"],
}
PLANNED_BATCH_TOKENS = load_hardware("h100").engine_batch_tokens
GPU = Device(torch_device=torch.device("cuda", 0), backend="cpu:gloo,cuda:nccl")
ONE_OF_8 = Layout(
    rank=0, world_size=8, tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, dp_rank=0, dp_size=8
)
LAUNCHED = {
    "RANK": "0",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "8",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


class Stop(Exception):
    """Far enough: what follows needs the GPU."""


def settings_of(config: Config, table: WeightTable) -> Any:
    """The `EngineSettings` that the run makes of its configuration."""
    from megatron_opsft.rollout import open_engine as module

    seen: list[Any] = []
    keep = lambda settings, *args, **kwargs: seen.append(settings)  # noqa: E731
    with (
        patch.object(module, "VllmEngine", keep),
        patch.object(module, "broadcast_object", lambda value: value),
    ):
        model_dir = resolve_config(config.model.path)
        module.open_engine(config, model_dir, None, table, GPU, ONE_OF_8)  # type: ignore[arg-type]
    (settings,) = seen
    return settings


def vllm_config(config: Config, table: WeightTable) -> Any:
    """vLLM's whole configuration, by way of the run's own call of `LLM`."""
    from vllm.entrypoints.llm import LLMEngine

    from megatron_opsft.rollout.vllm.options import start_llm

    made: list[Any] = []

    def keep(engine_args: Any, usage_context: Any, **kwargs: Any) -> None:
        made.append(engine_args.create_engine_config(usage_context))
        raise Stop

    with patch.object(LLMEngine, "from_engine_args", keep):
        try:
            start_llm(settings_of(config, table), table)
        except Stop:
            return made[0]
    raise AssertionError("LLM did not ask for an engine")


def read_vllm(name: str, overrides: list[str]) -> dict[str, Any]:
    """One configuration with one kind of engine."""
    config = load_config(named(name), ["rollout.engine=vllm", *overrides])
    prepare_environment(config)
    table = WeightTable(read_model_shape(resolve_config(config.model.path)))
    found = vllm_config(config, table)
    model, parallel, cache = found.model_config, found.parallel_config, found.cache_config
    return {
        "dtype": [str(model.dtype), f"torch.{config.model.dtype}"],
        "tokens": [model.max_model_len, max_engine_tokens(config)],
        "sleeps": [
            (
                model.enable_sleep_mode,
                model.enable_nccl_comm_suspend,
                found.use_cumem_cudagraph_pool,
            ),
            (True, config.rollout.deep_sleep, config.rollout.deep_sleep),
        ],
        "seed": [model.seed, config.run.seed],
        "architecture": model.architecture,
        "vocabulary": [model.get_vocab_size(), table.shape.vocab_size],
        "tp": [parallel.tensor_parallel_size, config.rollout.tp],
        "worker_cls": parallel.worker_cls,
        "backend": str(parallel.distributed_executor_backend),
        "timeout": [parallel.distributed_timeout_seconds, 60 * config.run.collective_minutes],
        "cpu_timeout": [
            parallel.cpu_distributed_timeout_seconds,
            60 * config.run.collective_minutes,
        ],
        "load_format": str(found.load_config.load_format),
        "batch_size": [found.scheduler_config.max_num_seqs, config.rollout.batch_size],
        "batch_tokens": [found.scheduler_config.max_num_batched_tokens, PLANNED_BATCH_TOKENS],
        "memory": [cache.gpu_memory_utilization, config.rollout.gpu_memory_fraction],
        "kv_cache_bytes": [cache.kv_cache_memory_bytes, config.rollout.kv_cache_bytes],
        "prefix_caching": cache.enable_prefix_caching,
        "routing": [
            found.aux_output_config.enable_return_routed_experts,
            config.train.routing_replay,
        ],
        "device": found.device_config.device_type,
        "eager": model.enforce_eager,
    }


def named(name: str) -> Path:
    return next(path for path in CONFIGS if path.stem == name)


def all_vllm() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in CONFIGS:
        for engine, overrides in ENGINES.items():
            yield f"{path.stem}, {engine}", read_vllm(path.stem, overrides)


def first_argument(module: Any, name: str, call: Callable[[], object]) -> Any:
    """The configuration that a function of this name is called with."""
    kept: list[Any] = []

    def keep(*args: Any, **kwargs: Any) -> None:
        kept.append(args[0] if args else kwargs["ddp_config"])
        raise Stop

    with patch.object(module, name, keep):
        try:
            call()
        except Stop:
            return kept[0]
    raise AssertionError(f"{name} was not called")


def read_megatron(path: Path) -> dict[str, Any]:
    """TransformerConfig and the optimizer's and data parallelism's."""
    from megatron_opsft.model import build, optimizer
    from megatron_opsft.model.transformer_config import transformer_config
    from megatron_opsft.runtime.device import transformer_engine_version

    config = load_config(path)
    shape = read_model_shape(resolve_config(config.model.path))
    megatron = transformer_config(
        shape,
        dtype=config.model.dtype,
        parallel=config.parallel,
        train=config.train,
        device=GPU,
        deterministic=config.run.deterministic,
    )
    adam = first_argument(
        optimizer,
        "get_megatron_optimizer",
        lambda: optimizer.build_optimizer([], config.optimizer, bf16=megatron.bf16),
    )
    ddp = first_argument(
        build,
        "DistributedDataParallel",
        lambda: build.wrap_for_training([None], megatron, config.parallel),  # type: ignore[list-item]
    )
    bf16 = config.model.dtype == "bfloat16"
    return {
        "te": [transformer_engine_version(GPU), (2, 20)],
        "layers": [megatron.num_layers, shape.num_layers],
        "hidden": [megatron.hidden_size, shape.hidden_size],
        "ffn": [megatron.ffn_hidden_size, shape.ffn_size],
        "kv_heads": [megatron.num_query_groups, shape.num_kv_heads],
        "qkv_bias": [megatron.add_qkv_bias, shape.qkv_bias],
        "dtype": [str(megatron.params_dtype), f"torch.{config.model.dtype}"],
        "bf16": [megatron.bf16, bf16],
        "fused_rope": [megatron.apply_rope_fusion, bf16],
        "tp": [megatron.tensor_model_parallel_size, config.parallel.tp],
        "sequence_parallel": [megatron.sequence_parallel, config.parallel.sequence_parallel],
        "made_on_cpu": [megatron.use_cpu_initialization, False],
        "lr": [adam.lr, config.optimizer.lr],
        "beta1": [adam.adam_beta1, config.optimizer.beta1],
        "beta2": [adam.adam_beta2, config.optimizer.beta2],
        "eps": [adam.adam_eps, config.optimizer.eps],
        "weight_decay": [adam.weight_decay, config.optimizer.weight_decay],
        "clip_grad": [adam.clip_grad, config.optimizer.clip_grad],
        "adam_bf16": [adam.bf16, bf16],
        "float32_gradients": [ddp.grad_reduce_in_fp32, True],
        "distributed_optimizer": [ddp.use_distributed_optimizer, True],
        "overlap_reduce": [ddp.overlap_grad_reduce, config.parallel.overlap_grad_reduce],
    }


def main() -> None:
    """Make, read back, print."""
    what = sys.argv[1]
    pretend()
    os.environ.update(LAUNCHED)
    if what == "megatron":
        import transformer_engine.pytorch  # noqa: F401

        told: dict[str, Any] = {path.stem: read_megatron(path) for path in CONFIGS}
    elif what == "vllm":
        pretend_to_vllm()
        told = dict(all_vllm())
    else:
        name = "r1_distill_7b_paper"
        # Read when vLLM is imported.
        prepare_environment(load_config(named(name), ["run.deterministic=true"]))
        pretend_to_vllm()
        told = read_vllm(name, ["run.deterministic=true"])
        told["batch_invariant"] = os.environ["VLLM_BATCH_INVARIANT"]
    print(json.dumps(told))


if __name__ == "__main__":
    main()
