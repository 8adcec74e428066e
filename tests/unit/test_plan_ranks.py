"""What a plan counts on every distinct rank, against Megatron's own model without memory."""

from concurrent.futures import Executor
from dataclasses import replace

import pytest
from plan_cases import LARGE, MIXTURE, SMALL, make_job
from plan_jobs import built_stages

# Model, ranks, tp, pp, vpp; then the parameters of its published weights.
REAL = [
    (SMALL, 8, 1, 1, None, 1_777_088_000),
    ("DeepSeek-R1-Distill-Qwen-7B", 32, 4, 1, None, 7_615_616_512),
    ("DeepSeek-R1-Distill-Qwen-32B", 128, 8, 2, None, 32_763_876_352),
    (LARGE, 512, 8, 4, 2, 72_706_203_648),
    (MIXTURE, 64, 4, 2, None, 30_532_122_624),
]


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
    layout = (f"parallel.tp={tp}", f"parallel.pp={pp}", f"parallel.vpp={vpp or 'null'}")
    job = make_job(model, world_size, *layout, f"parallel.sequence_parallel={tp > 1}")
    assert job.num_parameters == published
    built = elsewhere.submit(built_stages, job).result()
    for ours, megatron in zip(job.stages, built, strict=True):
        # Megatron pads its buffers a little.
        assert 1 <= megatron.weight_bytes / ours.weight_bytes < 1.0001
        assert 1 <= megatron.gradient_bytes / ours.gradient_bytes < 1.0001
        assert megatron.optimizer_bytes == pytest.approx(ours.optimizer_bytes, rel=1e-3)
        assert megatron.updated_parameters == pytest.approx(ours.updated_parameters, rel=1e-3)
        padded = ("weight_bytes", "gradient_bytes", "optimizer_bytes", "updated_parameters")
        assert replace(megatron, **{name: getattr(ours, name) for name in padded}) == ours
