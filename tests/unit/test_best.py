"""Which evaluation is the best, and which models of earlier ones stay."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_opsft.run.record.evaluations import drop_superseded
from megatron_opsft.run.run_files import best_evaluation


@pytest.mark.parametrize(
    ("measured", "best"),
    [
        ([], None),
        ([(0.8, 100)], 0),
        ([(0.8, 100), (0.79, 50)], 4),  # within 0.01 of the base model's
        ([(0.8, 100), (0.78, 50)], 0),  # short, but it loses too much
        ([(0.8, 100), (0.8, 60), (0.7, 10), (0.9, 70)], 4),
        ([(0.8, 100), (0.8, 60), (0.85, 60)], 8),  # as short, and more accurate
        ([(0.8, 100), (0.8, 60), (0.8, 60)], 4),  # equal: the earlier
        ([(0.8, 100), (0.95, 110)], 0),  # longer than the base model: not what is wanted
    ],
)
def test_the_shortest_that_loses_no_more_accuracy_than_allowed(
    measured: list[tuple[float, float]], best: int | None
) -> None:
    evaluations = [
        {"step": 4 * number, "eval_accuracy": accuracy, "eval_mean_response_tokens": tokens}
        for number, (accuracy, tokens) in enumerate(measured)
    ]
    found = best_evaluation(evaluations, within=0.01 + 1e-12)
    assert found.get("step") == best


@pytest.mark.parametrize(
    ("every", "saved", "step", "finished", "kept"),
    [
        (0, [], 5, False, [4]),  # a run that is resumed begins anew
        (4, [4], 9, False, [4, 7, 9]),  # the checkpoint of step 8 is being written
        (4, [], 5, False, [4]),
        (2, [2, 4], 5, False, [1, 4]),
        (4, [4, 8], 9, True, [9]),
    ],
)
def test_of_superseded_models_those_stay_that_a_resumed_run_needs(
    tmp_path: Path, every: int, saved: list[int], step: int, finished: bool, kept: list[int]
) -> None:
    made = [f"best/step_{number:06d}/a" for number in (1, 3, 4, 7, 9) if number <= step]
    made += [f"checkpoints/step_{number:06d}/complete.json" for number in saved]
    for name in made:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    run, checkpoint = SimpleNamespace(dir=tmp_path), SimpleNamespace(every=every)
    config = SimpleNamespace(run=run, checkpoint=checkpoint)
    session: Any = SimpleNamespace(config=config, layout=SimpleNamespace(is_main=True))
    drop_superseded(session, step, finished=finished)
    found = sorted(path.name for path in (tmp_path / "best").iterdir())
    assert found == [f"step_{number:06d}" for number in kept]
