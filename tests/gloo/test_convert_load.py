"""Converted checkpoints in Megatron-Core's own hands: read by `dist_checkpointing.load` at any
layout, the logits of every architecture equal to those of Hugging Face's own class.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hf_reference import hf_model, largest_logit_difference
from jobs import Case, Logits, batches_of, forward_logits, load_with_megatron, logits
from megatron.core import parallel_state
from tiers import for_release
from tiny_models import SHAPES
from world import World

from megatron_opsft.commands.convert.run import open_source, write_source
from megatron_opsft.config import ParallelConfig, TrainConfig
from megatron_opsft.runtime.distributed import current_layout, gather_from_all
from megatron_opsft.trainer.model.build import build_model
from megatron_opsft.trainer.model.transformer_config import transformer_config

LIMIT = 1e-4  # largest absolute difference, float32; the logits themselves reach about 4
CASES = [
    ("qwen2", 1, 1, None),
    *((model, 2, 2, None) for model in SHAPES),
    ("qwen2", 2, 1, None),
    ("qwen2_tied", 1, 2, None),
    *((model, 2, 2, 2) for model in ("qwen2_tied", "qwen3_moe")),
]
COMBINED = [(model, 1, 1, None) for model in SHAPES if model != "qwen2"]
SHARD_BYTES = 60_000  # several files even for tiny models


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Name of a model of `SHAPES` -> its converted checkpoint."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            directory = tmp_path_factory.mktemp(name)
            hf_model(name).save_pretrained(directory / "hf")
            out = directory / "megatron"
            source = open_source(directory / "hf")
            write_source(source, out, "megatron", max_shard_bytes=SHARD_BYTES)
            made[name] = directory / "megatron"
        return made[name]

    return get


@pytest.mark.parametrize(("model", "tp", "pp", "vpp"), [*CASES, *for_release(COMBINED)])
def test_plain_megatron_loads_it(
    world: World, converted: Any, model: str, tp: int, pp: int, vpp: int | None
) -> None:
    # Megatron runs experts over several tensor-parallel ranks with sequence parallelism alone.
    experts = SHAPES[model].moe is not None
    case = Case(model=model, tp=tp, pp=pp, vpp=vpp, sequence_parallel=experts and tp > 1)
    ranks = world.run(logits, case.world_size, case, converted(model))
    (found,) = (batches for batches in ranks if batches)
    assert largest_logit_difference(model, found) < LIMIT


def expert_parallel_logits(case: Case, checkpoint: Path) -> tuple[int, Logits]:
    """With the experts dealt out over the ranks: how many this one has, and the logits."""
    size = case.world_size
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=size, create_gloo_process_groups=False
    )
    shape = SHAPES[case.model]
    config = transformer_config(
        shape,
        dtype="float32",
        parallel=ParallelConfig(),
        train=TrainConfig(),
        device=case.device,
    )
    config = replace(
        config,
        expert_model_parallel_size=size,
        moe_token_dispatcher_type="allgather",  # the other one hands gloo tensors as split sizes
        variable_seq_lengths=False,
    )
    models = build_model(shape, config, case.device)
    load_with_megatron(models, checkpoint)
    # The tokens come to the first rank of the one replica that the layout claims.
    batches, _ = batches_of(case, replace(current_layout(), dp_rank=0, dp_size=1))
    batches = gather_from_all(batches if case.all_on_rank == dist.get_rank() else [])
    num_experts = len(models[0].decoder.layers[0].mlp.experts.local_experts)
    return num_experts, forward_logits(models, batches, shape.vocab_size)


def test_plain_megatron_loads_experts_over_ranks(world: World, converted: Any) -> None:
    case = Case(model="qwen3_moe", dp=2, all_on_rank=0)
    for num_experts, found in world.run(expert_parallel_logits, 2, case, converted("qwen3_moe")):
        assert num_experts == 4
        assert largest_logit_difference("qwen3_moe", found) < LIMIT
