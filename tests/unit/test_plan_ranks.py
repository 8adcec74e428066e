"""Megatron's own model of every distinct rank, without memory, against counts of other kinds."""

from concurrent.futures import Executor
from dataclasses import replace
from math import prod

import pytest
from jobs import Case
from placements import megatron_placements
from plan_jobs import planned_job, planned_ranks, planned_stages, updated_elements
from real_shapes import REAL_SHAPES
from tiny_models import SHAPES

from megatron_opsft.config_file import load_config
from megatron_opsft.plan.hardware import load_hardware
from megatron_opsft.plan.job import TrainingJob
from megatron_opsft.plan.memory import Stage
from megatron_opsft.plan.stages import count_stages
from megatron_opsft.weights.rules import WeightTable

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
def test_parameters_add_up_to_the_hugging_face_model(
    elsewhere: Executor,
    model: str,
    world_size: int,
    tp: int,
    pp: int,
    vpp: int | None,
    published: int,
) -> None:
    job = real_job(model, world_size, tp, pp, vpp)
    stages: list[Stage] = elsewhere.submit(planned_stages, job).result()
    assert sum(stage.whole_parameters for stage in stages) == published
    assert sum(prod(s) for s in WeightTable(job.shape).hf_shapes().values()) == published
    # By the names and cuts of the weight table, which every load and push relies on.
    placements = megatron_placements(
        WeightTable(job.shape, tp_size=tp), tp=tp, pp=pp, dp=1, vpp=vpp
    )
    assert [stage.num_parameters for stage in stages for _ in range(tp)] == [
        sum(prod(parameter.shape) for parameter in placement.parameters) for placement in placements
    ]
    for stage, counted in zip(stages, count_stages(job), strict=True):
        assert stage.num_parameters == counted.num_parameters
        assert stage.whole_parameters == counted.whole_parameters
        # Megatron pads its buffers a little.
        assert 1 <= stage.weight_bytes / counted.weight_bytes < 1.0001
        assert 1 <= stage.gradient_bytes / counted.gradient_bytes < 1.0001
        assert stage.optimizer_bytes == pytest.approx(counted.optimizer_bytes, rel=1e-3)


@pytest.mark.parametrize("model", ["qwen2_tied", "llama_mha", "qwen3_moe"])
def test_peers_of_a_rank_hold_as_much(elsewhere: Executor, model: str) -> None:
    """At TP 2 x DP 2 x PP 2: every rank is built for itself."""
    case = Case(model=model, tp=2, pp=2, dp=2, sequence_parallel=True)
    job = planned_job(case, 1024)
    stages = elsewhere.submit(planned_stages, job).result()
    ranks = elsewhere.submit(planned_ranks, job, list(range(8))).result()
    assert [rank.index for rank in ranks] == [0] * 4 + [1] * 4
    assert ranks == [stages[0]] * 4 + [stages[1]] * 4


@pytest.mark.parametrize("dp", [1, 3, 4])
def test_the_optimizer_updates_every_element_once(elsewhere: Executor, dp: int) -> None:
    job = planned_job(Case(dp=dp), 1024)
    shares = elsewhere.submit(updated_elements, job, 0).result()
    (stage,) = elsewhere.submit(planned_stages, job).result()
    assert len(shares) == dp
    assert sum(shares) == stage.num_parameters
    assert stage.optimizer_bytes == 8 * max(shares)


def test_a_model_that_shares_its_embedding_counts_it_once(elsewhere: Executor) -> None:
    tied, apart = (
        elsewhere.submit(planned_stages, planned_job(Case(model=model, pp=2), 1024)).result()
        for model in ("qwen2_tied", "qwen2")
    )
    assert [s.num_parameters for s in tied] == [s.num_parameters for s in apart]
    embedding = SHAPES["qwen2"].vocab_size * SHAPES["qwen2"].hidden_size
    whole = [sum(s.whole_parameters for s in stages) for stages in (tied, apart)]
    assert whole[1] - whole[0] == embedding
    alone = replace(planned_job(Case(model="qwen2_tied"), 1024), world_size=1)
    assert count_stages(alone)[0].whole_parameters == whole[0]
