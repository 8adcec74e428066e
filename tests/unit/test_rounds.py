"""Rounds of fixed data: what is started with which model, seed and data."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from commands import command_of

from megatron_opsft.config.load import load_config
from megatron_opsft.data.stored_responses import StoredResponse, write_stored_responses
from megatron_opsft.errors import UserError
from megatron_opsft.launch.rounds import Rounds, check_rounds, run_rounds

KEYS = ["model.path=base", "data.train=d", "method.name=off_policy_sft", "run.seed=5"]
BATCH = ["data.prompts_per_step=2", "rollout.group_size=2"]


class Started:
    """What was started; it leaves what the real commands leave, and fails when told to."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.fails_with = 0

    def __call__(self, words: Sequence[str]) -> int:
        self.commands.append(list(words))
        program, rest = command_of(words)
        program.read(rest)  # type: ignore[attr-defined]  # the program takes them
        if self.fails_with:
            return self.fails_with
        if words[0] == "data":
            row = StoredResponse(problem_id="p", prompt_ids=(1,), response_ids=(2,))
            write_stored_responses(Path(words[-1]), [row] * 11, {})
        else:
            *_, run_dir = (w.partition("=")[2] for w in words if w.startswith("run.dir="))
            Path(run_dir).mkdir()
            (Path(run_dir) / "summary.json").write_text("{}")
        return 0


def test_a_round_begins_with_the_model_of_the_one_before_and_is_not_made_twice(
    tmp_path: Path,
) -> None:
    words = ["run.yaml", *KEYS, *BATCH, f"run.dir={tmp_path}"]
    rounds = Rounds(config=load_config(None, words[1:]), words=words, count=3, problems=100)
    started = Started()
    assert run_rounds(rounds, started) == 0
    made, trained = started.commands[0::2], started.commands[1::2]
    models = ["base", tmp_path / "round_1/hf", tmp_path / "round_2/hf"]
    for number, (model, data, run) in enumerate(zip(models, made, trained, strict=True), start=1):
        file = tmp_path / f"round_{number}.parquet"
        own = [f"model.path={model}", f"run.seed={4 + number}"]
        assert data == ["data", "off_policy_sft", *words, *own, "--limit", "100", "--out"] + [
            str(file)
        ]
        # 11 responses are two whole batches of 4.
        of_run = [f"run.dir={tmp_path}/round_{number}", "run.steps=2", f"data.responses={file}"]
        assert run == ["train", *words, *own, *of_run, "--resume=auto"]
    assert run_rounds(rounds, started) == 0 and len(started.commands) == 6

    (tmp_path / "round_3/summary.json").unlink()
    (tmp_path / "round_3").rmdir()
    started.fails_with = 75
    assert run_rounds(rounds, started) == 75
    assert [words[0] for words in started.commands[6:]] == ["train"]  # its data are there


def test_a_method_that_samples_has_no_rounds() -> None:
    with pytest.raises(UserError, match=r"method\.name=grpo samples while it trains"):
        check_rounds(load_config(None, ["model.path=m", "data.train=d", "method.name=grpo"]))
