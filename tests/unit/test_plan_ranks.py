"""What a plan counts on every distinct rank, against Megatron's own model without memory."""

from concurrent.futures import Executor
from dataclasses import replace

import pytest
from plan_jobs import built_stages
from real_shapes import REAL_SHAPES

from megatron_opsft.config.load import load_config
from megatron_opsft.plan.hardware import load_hardware
from megatron_opsft.plan.job import TrainingJob
from megatron_opsft.plan.stages import count_stages

# Model, ranks, tp, pp, vpp; then the parameters of its published weights.
REAL = [
    ("DeepSeek-R1-Distill-Qwen-1.5B", 8, 1, 1, None, 1_777_088_000),
    ("DeepSeek-R1-Distill-Qwen-7B", 32, 4, 1, None, 7_615_616_512),
    ("DeepSeek-R1-Distill-Qwen-32B", 128, 8, 2, None, 32_763_876_352),
    ("Qwen2.5-72B", 512, 8, 4, 2, 72_706_203_648),
    ("Qwen3-30B-A3B", 64, 4, 2, None, 30_532_122_624),
]


def real_job(model: str, world_size: int, tp: int, pp: int, vpp: int | None) -> TrainingJob:
    config = load_config(
        None,
        [
            f"model.path={model}",
            "data.train=problems.jsonl",
            "rollout.engine=vllm",
            f"parallel.tp={tp}",
            f"parallel.pp={pp}",
            f"parallel.vpp={vpp or 'null'}",
            f"parallel.sequence_parallel={tp > 1}",
        ],
    )
    hardware = load_hardware("h100")
    return TrainingJob(
        config=config, shape=REAL_SHAPES[model], hardware=hardware, world_size=world_size
    )


@pytest.mark.parametrize(("model", "world_size", "tp", "pp", "vpp", "published"), REAL)
def test_counted_stages_are_megatron_s_own(
    elsewhere: Executor,
    model: str,
    world_size: int,
    tp: int,
    pp: int,
    vpp: int | None,
    published: int,
) -> None:
    job = real_job(model, world_size, tp, pp, vpp)
    built = elsewhere.submit(built_stages, job).result()
    counted = count_stages(job)
    assert sum(stage.whole_parameters for stage in counted) == published
    for ours, megatron in zip(counted, built, strict=True):
        # Megatron pads its buffers a little.
        assert 1 <= megatron.weight_bytes / ours.weight_bytes < 1.0001
        assert 1 <= megatron.gradient_bytes / ours.gradient_bytes < 1.0001
        assert megatron.optimizer_bytes == pytest.approx(ours.optimizer_bytes, rel=1e-3)
        padded = {
            name: getattr(ours, name)
            for name in ("weight_bytes", "gradient_bytes", "optimizer_bytes")
        }
        assert replace(megatron, **padded) == ours
