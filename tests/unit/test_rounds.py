"""Rounds of fixed data: what is started with which model, seed and data."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from commands import read_command

from megatron_opsft.commands.launch.rounds import RoundsPlan, check_rounds, run_rounds
from megatron_opsft.config.load import load_config
from megatron_opsft.data.stored_responses import StoredResponse, write_stored_responses
from megatron_opsft.errors import UserError

KEYS = ["model.path=base", "data.train=d", "method.name=off_policy_sft", "run.seed=5"]
BATCH = ["data.prompts_per_step=2", "rollout.group_size=2"]


class Started:
    """What was started; it leaves what the real commands leave, and fails when told to."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.fails_with = 0

    def __call__(self, words: Sequence[str]) -> int:
        self.commands.append(list(words))
        read_command(words)  # the program takes them
        if not self.fails_with and words[0] == "data":
            row = StoredResponse(problem_id="p", prompt_ids=(1,), response_ids=(2,))
            write_stored_responses(Path(words[-1]), [row] * 11, {})
        elif not self.fails_with:
            (run_dir,) = (Path(w[8:]) for w in words[-4:] if w.startswith("run.dir="))
            run_dir.mkdir()
            (run_dir / "summary.json").write_text("{}")
        return self.fails_with


def test_a_round_begins_with_the_model_of_the_one_before_and_is_not_made_twice(
    tmp_path: Path,
) -> None:
    words = ["run.yaml", *KEYS, *BATCH, f"run.dir={tmp_path}"]
    rounds = RoundsPlan(config=load_config(None, words[1:]), words=words, count=2, problems=100)
    started = Started()
    assert run_rounds(rounds, started) == 0
    expected = []
    for number, model in enumerate(["base", tmp_path / "round_1/hf"], start=1):
        run, file = tmp_path / f"round_{number}", tmp_path / f"round_{number}.parquet"
        own = [*words, f"model.path={model}", f"run.seed={4 + number}"]
        expected.append(["data", "off_policy_sft", *own, "--limit", "100", "--out", str(file)])
        # 11 responses are two whole batches of 4.
        of_run = [f"run.dir={run}", "run.steps=2", f"data.responses={file}"]
        expected.append(["train", *own, *of_run, "--resume=auto"])
    assert started.commands == expected
    assert run_rounds(rounds, started) == 0 and started.commands == expected
    with pytest.raises(UserError, match="rounds with --problems=100, not 7; set it back"):
        run_rounds(replace(rounds, problems=7), started)

    (tmp_path / "round_2/summary.json").unlink()
    (tmp_path / "round_2").rmdir()
    started.fails_with = 75
    assert run_rounds(rounds, started) == 75
    assert started.commands[4:] == expected[3:]  # its data are there


def test_a_method_that_samples_has_no_rounds() -> None:
    with pytest.raises(UserError, match=r"method\.name=grpo samples while it trains"):
        check_rounds(load_config(None, ["model.path=m", "data.train=d", "method.name=grpo"]))
