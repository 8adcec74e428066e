"""What the shipped configurations become in the classes of vLLM and Megatron, on a pretended GPU.

Prints JSON: case -> what was read back and is not what it must be, beside that.
Usage: python real_configs.py vllm|megatron|deterministic
"""

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from pretend_cuda import pretend, pretend_to_vllm

from megatron_opsft.commands.plan.assumptions import load_hardware
from megatron_opsft.config import Config
from megatron_opsft.config.load import load_config
from megatron_opsft.models.architectures.config_from_hf import read_model_shape
from megatron_opsft.models.storage.model_paths import resolve_config
from megatron_opsft.models.weights.rules import WeightTable
from megatron_opsft.run.start.checked_run import max_engine_tokens
from megatron_opsft.runtime.device import Device, prepare_environment
from megatron_opsft.runtime.distributed import Layout

CONFIGS = sorted((Path(__file__).parents[2] / "examples/configs").glob("*.yaml"))
OTHER_ENGINE = ["rollout.tp=2", "rollout.kv_cache_bytes=4000000000", "rollout.deep_sleep=true"]
GPU = Device(torch_device=torch.device("cuda", 0), backend="cpu:gloo,cuda:nccl")
ONE_OF_8 = Layout(
    rank=0, world_size=8, tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, dp_rank=0, dp_size=8
)
LAUNCHED = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "RANK": "0", "LOCAL_RANK": "0"}
LAUNCHED |= {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}


class Stop(Exception):
    """Far enough: what follows needs the GPU."""


def vllm_config(config: Config, table: WeightTable) -> Any:
    """vLLM's whole configuration, by way of the run's own call of `LLM`."""
    from vllm.entrypoints.llm import LLMEngine

    from megatron_opsft.rollout import open_engine
    from megatron_opsft.rollout.vllm.options import start_llm
    from megatron_opsft.run.start import engine

    made: list[Any] = []

    def keep(engine_args: Any, usage_context: Any, **kwargs: Any) -> None:
        made.append(engine_args.create_engine_config(usage_context))
        raise Stop

    with (
        patch.object(
            open_engine, "VllmEngine", lambda settings, table, _: start_llm(settings, table)
        ),
        patch.object(engine, "broadcast_object", lambda value: value),
        patch.object(LLMEngine, "from_engine_args", keep),
        suppress(Stop),
    ):
        model_dir = resolve_config(config.model.path)
        settings = engine.engine_settings(config, model_dir, GPU, ONE_OF_8)
        open_engine.build_engine("vllm", settings, table, None, GPU)  # type: ignore[arg-type]
    return made[0]


def prepare(config: Config) -> None:
    """As the start of a run does."""
    run = config.run
    prepare_environment(run.device, config.parallel, deterministic=run.deterministic)


def different(pairs: dict[str, tuple[Any, Any]]) -> dict[str, tuple[Any, Any]]:
    return {name: (found, wanted) for name, (found, wanted) in pairs.items() if found != wanted}


def read_vllm(name: str, overrides: list[str]) -> dict[str, Any]:
    """One configuration with one kind of engine. Of what is handed over as it is, what another
    part of vLLM might change.
    """
    config = load_config(named(name), ["rollout.engine=vllm", *overrides])
    prepare(config)
    rollout = config.rollout
    shape = read_model_shape(resolve_config(config.model.path))
    found = vllm_config(config, WeightTable(shape))
    model, parallel, cache = found.model_config, found.parallel_config, found.cache_config
    asleep = model.enable_sleep_mode, model.enable_nccl_comm_suspend, found.use_cumem_cudagraph_pool
    batch = found.scheduler_config.max_num_seqs, found.scheduler_config.max_num_batched_tokens
    memory = cache.gpu_memory_utilization, cache.kv_cache_memory_bytes
    routing = found.aux_output_config.enable_return_routed_experts
    replays, fuses = config.train.routing_replay, found.compilation_config.pass_config
    return different(
        {
            "device": (found.device_config.device_type, "cuda"),
            "dtype": (str(model.dtype), f"torch.{config.model.dtype}"),
            "tokens": (model.max_model_len, max_engine_tokens(config)),
            "asleep": (asleep, (True, rollout.deep_sleep, rollout.deep_sleep)),
            "architecture": (model.architecture, shape.architecture),
            "tp": (parallel.tensor_parallel_size, rollout.tp),
            "worker_cls": (parallel.worker_cls, "vllm.v1.worker.gpu_worker.Worker"),
            "backend": (str(parallel.distributed_executor_backend), "external_launcher"),
            "load_format": (str(found.load_config.load_format), "dummy"),
            "batch": (batch, (rollout.batch_size, load_hardware("h100").engine_batch_tokens)),
            "memory": (memory, (rollout.gpu_memory_fraction, rollout.kv_cache_bytes)),
            "prefix_caching": (cache.enable_prefix_caching, True),
            "routing": (routing, replays),
            "async": (found.scheduler_config.async_scheduling, not replays),
            "FlashInfer's sums": (fuses.fuse_allreduce_rms, False),
            "eager": (model.enforce_eager, False),
        }
    )


def named(name: str) -> Path:
    return next(path for path in CONFIGS if path.stem == name)


def read_megatron(path: Path) -> dict[str, Any]:
    """`TransformerConfig`, of which a CPU takes other parts."""
    from megatron_opsft.runtime.device import transformer_engine_version, why_no_delta_kernels
    from megatron_opsft.trainer.model.transformer_config import transformer_config

    config = load_config(path)
    megatron = transformer_config(
        read_model_shape(resolve_config(config.model.path)),
        dtype=config.model.dtype,
        parallel=config.parallel,
        train=config.train,
        device=GPU,
        deterministic=config.run.deterministic,
    )
    bf16 = config.model.dtype == "bfloat16"
    return different(
        {
            "te": (transformer_engine_version(GPU), (2, 20)),
            "delta_kernels": (why_no_delta_kernels(GPU), None),
            "bf16": (megatron.bf16, bf16),
            "fused_rope": (megatron.apply_rope_fusion, bf16),
            "made_on_cpu": (megatron.use_cpu_initialization, False),
        }
    )


def main() -> None:
    """Make, read back, print."""
    what = sys.argv[1]
    pretend()
    os.environ.update(LAUNCHED)
    told: dict[str, Any] = {}
    if what == "megatron":
        import transformer_engine.pytorch  # noqa: F401

        told = {path.stem: read_megatron(path) for path in CONFIGS}
    elif what == "vllm":
        pretend_to_vllm()
        for path in CONFIGS:
            told[path.stem] = read_vllm(path.stem, [])
            told[f"{path.stem}, other"] = read_vllm(path.stem, OTHER_ENGINE)
    else:
        name, bits = "r1_distill_7b_paper", ["run.deterministic=true"]
        prepare(load_config(named(name), bits))  # read when vLLM is imported
        pretend_to_vllm()
        told[name] = read_vllm(name, bits)
        assert os.environ["VLLM_BATCH_INVARIANT"] == "1"
    # vLLM's CPU worker puts other functions into `torch.cuda`.
    assert not [name for name in sys.modules if name.startswith("vllm.v1.worker.cpu")]
    print(json.dumps(told))


if __name__ == "__main__":
    main()
