"""vLLM's own models for CUDA, on the meta device, against the layout that weights are written by.

Prints JSON: case -> the parameters that differ, as vLLM has them and as they are written.
"""

import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import real_configs
import torch
from hf_configs import hf_config
from plan_cases import REAL_SHAPES
from pretend_cuda import pretend, pretend_to_vllm

from megatron_opsft.config.load import load_config
from megatron_opsft.models.architectures.config_from_hf import read_model_shape
from megatron_opsft.models.architectures.shape import Llama3Scaling, ModelShape
from megatron_opsft.models.weights.rules import WeightTable

WORLD_SIZE = 16
SHAPES = {name.removeprefix("DeepSeek-"): shape for name, shape in REAL_SHAPES.items()}
SHAPES["Qwen2.5-1.5B"] = replace(
    SHAPES["R1-Distill-Qwen-1.5B"], tied_embeddings=True, rope_theta=1e6
)
SHAPES["Mistral-7B-v0.3"] = replace(
    SHAPES["Qwen3-8B"],
    architecture="MistralForCausalLM",
    num_layers=32,
    ffn_size=14336,
    vocab_size=32768,
    qk_norm=False,
    norm_eps=1e-5,
    max_position_embeddings=32768,
)
SHAPES["Llama-3.1-8B"] = replace(
    SHAPES["Mistral-7B-v0.3"],
    architecture="LlamaForCausalLM",
    vocab_size=128256,
    max_position_embeddings=131072,
    rope_theta=5e5,
    rope_scaling=Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
    ),
)
# Models and tensor-parallel sizes of vLLM: as many ranks as key/value heads, fewer and more.
ENGINES = [
    ("R1-Distill-Qwen-7B", 1),
    ("R1-Distill-Qwen-7B", 4),
    ("Qwen2.5-1.5B", 2),
    ("Qwen3-8B", 16),
    ("Llama-3.1-8B", 4),
    ("Mistral-7B-v0.3", 8),
    ("Qwen3-30B-A3B", 1),
    ("Qwen3-30B-A3B", 2),
    ("Qwen3-30B-A3B", 8),
]


def parameters_of(vllm_config: Any, rank: int, tp: int) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the model that vLLM builds on this rank."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype

    base = "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"
    new_group = dist.new_group
    dist.init_process_group("fake", rank=rank, world_size=WORLD_SIZE, store=FakeStore())
    # The other ranks are not there: nobody can be asked, and no group may wait for its members.
    with (
        patch.object(dist, "new_group", lambda ranks, **kwargs: new_group(ranks, backend="fake")),
        patch.object(type(current_platform), "get_device_communicator_cls", lambda *_: base),
        patch.object(parallel_state, "_node_count", lambda *_: 1),
        patch.object(parallel_state, "in_the_same_node_as", lambda *_, **__: [True] * WORLD_SIZE),
        patch.object(MessageQueue, "create_from_process_group", lambda *_, **__: None),
        set_current_vllm_config(vllm_config),
    ):
        parallel_state.init_distributed_environment(WORLD_SIZE, rank, "env://", rank, "fake")
        parallel_state.initialize_model_parallel(tp)
        with set_default_torch_dtype(torch.bfloat16), torch.device("meta"):
            model = initialize_model(vllm_config)
    found = {name: tuple(p.shape) for name, p in model.named_parameters()}
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    return found


def compare(shape: ModelShape, tp: int) -> dict[str, tuple[Any, Any]]:
    """On the first and on the last tensor-parallel rank."""
    from megatron_opsft.rollout.vllm.weights import vllm_layout

    with tempfile.TemporaryDirectory() as directory:
        hf = hf_config(shape)
        hf.architectures = [shape.architecture]
        hf.save_pretrained(directory)
        config = load_config(
            real_configs.named("r1_distill_7b_paper"),
            [f"model.path={directory}", f"rollout.tp={tp}"],
        )
        table, problems = WeightTable(read_model_shape(Path(directory))), {}
        for rank in sorted({0, tp - 1}):
            found = parameters_of(real_configs.vllm_config(config, table), rank, tp)
            wanted = {p.name: p.shape for p in vllm_layout(table, tp).parameters_of(rank)}
            pairs = {n: (found.get(n), wanted.get(n)) for n in found.keys() | wanted.keys()}
            problems |= real_configs.different(pairs)
    return problems


def main() -> None:
    """Build, compare, print."""
    pretend()
    os.environ.update(real_configs.LAUNCHED, WORLD_SIZE=str(WORLD_SIZE))
    pretend_to_vllm()
    told = {
        f"{name}-tp{tp}": compare(replace(SHAPES[name], num_layers=2), tp) for name, tp in ENGINES
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
