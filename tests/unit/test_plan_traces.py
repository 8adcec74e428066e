"""Responses of real runs as workloads of a step."""

import gzip
import json
from pathlib import Path

import pytest

from megatron_opsft.errors import UserError
from megatron_opsft.plan.lengths import make_workload
from megatron_opsft.plan.traces import draw_from_trace, read_step, read_trace, replay

ROWS = [
    {"problem_id": "a", "num_tokens": 10, "num_prompt_tokens": 4, "outcome": "correct"},
    {"problem_id": "a", "num_tokens": 20, "num_prompt_tokens": 4, "outcome": "wrong"},
    {"problem_id": "b", "num_tokens": 30, "num_prompt_tokens": 8, "outcome": "correct"},
    {"problem_id": "b", "num_tokens": 40, "num_prompt_tokens": 8, "outcome": "unfinished"},
]


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def test_a_step_is_replayed_with_the_longest_prompts_first(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "step_000001.jsonl.gz", ROWS)
    work = replay(read_step(file), prompt_tokens=99, limit=40)
    assert work.lengths == (30, 40, 10, 20)
    assert work.accepted == (30, 10)
    assert (work.prompt_tokens, work.limit) == (6, 40)


def test_a_run_is_a_trace_of_all_its_steps(tmp_path: Path) -> None:
    for step in (1, 2):
        write_rows(tmp_path / "rollouts" / f"step_00000{step}.jsonl.gz", ROWS)
    trace = read_trace(tmp_path)
    assert [[r.num_tokens for r in group] for group in trace] == [[10, 20], [30, 40]] * 2
    assert replay(trace, prompt_tokens=99, limit=40).prompt_tokens == 6


def test_a_file_of_lengths_is_enough(tmp_path: Path) -> None:
    trace = read_trace(write_rows(tmp_path / "x.jsonl", [{"num_tokens": n} for n in (5, 7)]))
    assert [[r.num_tokens for r in group] for group in trace] == [[5], [7]]
    work = draw_from_trace(trace, num_prompts=30, group_size=2, limit=7, prompt_tokens=11, seed=0)
    assert len(work.lengths) == 60
    assert work.prompt_tokens == 11
    # The limit cuts, and what it cuts is not accepted.
    assert set(work.lengths) == {5, 7}
    assert set(work.accepted) == {5}


def test_responses_to_a_problem_are_drawn_together(tmp_path: Path) -> None:
    trace = read_trace(write_rows(tmp_path / "x.jsonl", ROWS))
    work = draw_from_trace(trace, num_prompts=50, group_size=2, limit=100, prompt_tokens=1, seed=3)
    groups = {work.lengths[i : i + 2] for i in range(0, 100, 2)}
    assert groups == {(10, 20), (30, 40)}
    more = draw_from_trace(trace, num_prompts=9, group_size=5, limit=100, prompt_tokens=1, seed=3)
    for i in range(0, 45, 5):
        assert set(more.lengths[i : i + 5]) <= {10, 20} or set(more.lengths[i : i + 5]) <= {30, 40}
    again = draw_from_trace(trace, num_prompts=9, group_size=5, limit=100, prompt_tokens=1, seed=3)
    assert again == more


@pytest.mark.parametrize("text", ["", "[1]\n", "{\n", '{"length": 3}\n'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=r"x\.jsonl (holds no response|is no JSONL)"):
        read_trace(path)
    with pytest.raises(UserError, match="no rollouts/step"):
        read_trace(tmp_path / "nothing")


def test_drawn_lengths_have_the_mean_and_the_acceptance() -> None:
    work = make_workload(
        20_000, mean_tokens=1000, sigma=0.5, limit=4000, acceptance=0.4, prompt_tokens=9, seed=5
    )
    assert sum(work.lengths) / 20_000 == pytest.approx(1000, rel=0.02)
    assert len(work.accepted) == 8000
    assert max(work.accepted) < 4000
    assert max(work.lengths) == 4000
    assert sum(work.accepted) / 8000 == pytest.approx(1000, rel=0.03)
