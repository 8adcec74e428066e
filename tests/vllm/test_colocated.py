"""vLLM inside the training ranks: it samples from the trainer's weights, and a push that went wrong
does not pass unnoticed.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm_jobs import train_and_compare, with_session
from world import JobFailed, World

from megatron_opsft.errors import SyncError
from megatron_opsft.records import FinishReason, Rollout
from megatron_opsft.rollout.engine import make_request
from megatron_opsft.run.recorder import RunRecorder
from megatron_opsft.session import Session
from megatron_opsft.train import run_step

pytestmark = pytest.mark.vllm

# Few responses: with two tensor-parallel ranks on two cores a token costs 10 ms.
TP2 = ["rollout.tp=2", "data.prompts_per_step=2", "rollout.group_size=2"]
LAYOUTS = {
    "1 rank": (1, []),
    "train TP2, rollout TP1": (2, ["parallel.tp=2"]),
    "train PP2, rollout TP1": (2, ["parallel.pp=2"]),
    "train PP2, rollout TP2": (2, ["parallel.pp=2", *TP2]),
    "train TP2, rollout TP2": (2, ["parallel.tp=2", *TP2]),
}


# Packed weights always come as a stream of whole tensors; plain ones are written in place.
@pytest.mark.parametrize(
    ("name", "plain", "steps"),
    [
        ("1 rank", True, 20),
        ("train TP2, rollout TP1", True, 20),
        ("train PP2, rollout TP1", True, 5),
        ("train PP2, rollout TP2", True, 20),
        ("train TP2, rollout TP2", True, 5),
        ("1 rank", False, 5),
        ("train PP2, rollout TP2", False, 5),
    ],
)
def test_engine_log_probs_match_hf_after_each_step_and_a_pull_is_exact(
    vllm_world: World, tmp_path: Path, name: str, plain: bool, steps: int
) -> None:
    ranks, overrides = LAYOUTS[name]
    overrides = [*overrides, "optimizer.lr=5e-4"]
    arguments = (tmp_path, overrides, steps, plain)
    results = vllm_world.run(train_and_compare, ranks, *arguments, timeout=400)
    for differences, ways, not_pulled in results:
        assert len(differences) == steps
        assert max(differences) < 1e-4
        assert ways == ["in_place" if plain else "stream"] * steps
        assert not_pulled == 0


def outcome(session: Session, recorder: RunRecorder, spoil: Callable[[Session], None]) -> str:
    """Two good steps, then one whose push is spoiled; what the run says of it."""
    for step in (1, 2):
        run_step(session, recorder, step)
    spoil(session)
    try:
        run_step(session, recorder, 3)
    except SyncError as error:
        assert session.sync.version == 3
        return str(error)
    return "nothing"


def scale_one_shard(session: Session) -> None:
    """What leaves the trainer's last rank is not what it holds: one parameter by one percent."""
    sync: Any = session.sync
    if sync._transfer is None:
        stream = sync.exporter.stream

        def scaled() -> Any:
            for name, tensor in stream():
                yield name, tensor * 1.01 if name.endswith("2.mlp.down_proj.weight") else tensor

        sync.exporter.stream = scaled
        return
    run = sync._transfer.run
    if session.layout.rank != session.layout.world_size - 1:
        return
    name = next(n for n in sync._transfer._sources if n.endswith("3.mlp.linear_fc2.weight"))
    sources = dict(sync._transfer._sources)
    sync._transfer._sources = {**sources, name: sources[name] * 1.01}
    sync._transfer.run = run


def leave_the_tied_head_stale(session: Session) -> None:
    """The embedding is sent, its second name is not: vLLM's packed head keeps the old weight."""
    from megatron_opsft.rollout.vllm import core, engine

    checked = core.checked_stream

    def without_head(tensors: Any, layout: Any) -> Any:
        return ((n, t) for n, t in checked(tensors, layout) if n != "lm_head.weight")

    engine.checked_stream = without_head  # type: ignore[attr-defined]


def keep_the_prefix_cache(session: Session) -> None:
    """vLLM says that it dropped its cache, and did not."""
    session.sampler.engine._core.llm.reset_prefix_cache = lambda: True  # type: ignore[attr-defined]


def spoil_scale(session: Session, recorder: RunRecorder) -> str:
    return outcome(session, recorder, scale_one_shard)


def spoil_head(session: Session, recorder: RunRecorder) -> str:
    from megatron_opsft.rollout.vllm import core, engine

    try:
        return outcome(session, recorder, leave_the_tied_head_stale)
    finally:
        engine.checked_stream = core.checked_stream  # type: ignore[attr-defined]


def spoil_cache(session: Session, recorder: RunRecorder) -> str:
    return outcome(session, recorder, keep_the_prefix_cache)


@pytest.mark.parametrize("plain", [False, True], ids=["packed", "plain"])
@pytest.mark.parametrize(("ranks", "verify"), [(1, "full"), (2, "checksum")])
def test_a_scaled_shard_stops_the_run(
    vllm_world: World, tmp_path: Path, ranks: int, verify: str, plain: bool
) -> None:
    overrides = [f"sync.verify={verify}", f"parallel.tp={ranks}"]
    for said in vllm_world.run(with_session, ranks, tmp_path, overrides, spoil_scale, plain):
        assert "down_proj.weight" in said and "version 3" in said


def test_a_stale_tied_head_stops_the_run(vllm_world: World, tmp_path: Path) -> None:
    (said,) = vllm_world.run(with_session, 1, tmp_path, ["sync.verify=checksum"], spoil_head)
    assert "lm_head.weight" in said and "version 3" in said


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_kept_prefix_cache_stops_the_run(vllm_world: World, tmp_path: Path, ranks: int) -> None:
    overrides = ["sync.verify=full", f"rollout.tp={ranks}"]
    for said in vllm_world.run(with_session, ranks, tmp_path, overrides, spoil_cache):
        assert "cached" in said and "version 3" in said


def sample_twice(session: Session, recorder: RunRecorder) -> tuple[list[Rollout], list[Rollout]]:
    problems = session.problems_of(1)
    first, second = (
        session.sampler.sample(problems, session.settings, num_samples=4, step=1) for _ in range(2)
    )
    return first, second


def test_responses_depend_on_their_seeds_and_not_on_the_ranks(
    vllm_world: World, tmp_path: Path
) -> None:
    alone: dict[tuple[str, int], Rollout] = {}
    for ranks, overrides in ((1, []), (2, []), (2, ["rollout.tp=2"])):
        found: dict[tuple[str, int], Rollout] = {}
        for first, second in vllm_world.run(with_session, ranks, tmp_path, overrides, sample_twice):
            assert first == second
            found |= {(r.problem_id, r.sample_index): r for r in first}
        assert len(found) == 16
        alone = alone or found
        assert found == alone
    ids = [rollout.response_ids for rollout in alone.values()]
    assert len(set(ids)) == len(ids)


def cold_responses(session: Session, recorder: RunRecorder) -> list[Rollout]:
    """Almost without chance: temperature 0.001."""
    settings = session.held_out.settings if session.held_out else session.settings
    cold = type(settings)(
        temperature=0.001,
        top_p=1.0,
        max_response_tokens=settings.max_response_tokens,
        end_token_ids=settings.end_token_ids,
    )
    return session.sampler.sample(session.problems_of(1), cold, num_samples=1, step=1)


def test_both_engines_say_the_same_when_cold(vllm_world: World, tmp_path: Path) -> None:
    by_engine = []
    for engine in ("hf", "vllm"):
        for length in (250, 20):
            overrides = [f"rollout.engine={engine}", f"eval.max_response_tokens={length}"]
            overrides += ["rollout.max_response_tokens=20", "data.prompts_per_step=8"]
            (found,) = vllm_world.run(with_session, 1, tmp_path, overrides, cold_responses)
            by_engine.append(found)
    hf_long, hf_short, vllm_long, vllm_short = by_engine
    assert vllm_long == hf_long and vllm_short == hf_short
    assert {r.finish_reason for r in vllm_long} == {FinishReason.STOP}
    cut_off = [r for r in vllm_short if r.finish_reason is FinishReason.LENGTH]
    assert cut_off and {len(r.response_ids) for r in cut_off} == {20}


def test_rollout_tp_must_divide_the_world(vllm_world: World, tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match="rollout.tp=2 does not divide the world size 1"):
        vllm_world.run(with_session, 1, tmp_path, ["rollout.tp=2"], sample_twice)


def test_a_request_is_refused_before_the_first_push(vllm_world: World, tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match="holds no complete set of weights"):
        vllm_world.run(with_session, 1, tmp_path, [], generate_without_weights)


def generate_without_weights(session: Session, recorder: RunRecorder) -> None:
    engine = session.sampler.engine
    engine.begin_update()
    engine.generate([make_request("p", (1, 2), 1, 0, 1)], session.settings)
