"""`megatron-opsft diagnose` as users call it, on the shipped model and a disturbed copy of it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_cli import ROOT, Finished, ForkedCli
from safetensors.torch import load_file, save_file

from megatron_opsft.diagnose.summary import NUM_LARGEST
from megatron_opsft.errors import UserError
from megatron_opsft.report.diagnosis import read_responses

ASSET = ROOT / "megatron_opsft/assets/tiny_reasoner"
NUM_RESPONSES = 12
SMALL = ["--limit", "6", "--samples", "2", "--max-tokens", "250", "--device", "cpu"]
KILLED = """
import os, signal
from megatron_opsft.diagnose import run
append, left = run.append_line, [{left}]
def counted(path, line):
    append(path, line)
    left[0] -= 1
    if left[0] <= 0:
        os.kill(os.getpid(), signal.SIGKILL)
run.append_line = counted
"""
KILLED_WHILE_SAMPLING = """
import os, signal
from megatron_opsft.diagnose import responses
responses.read_inputs = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def efficient(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "efficient"
    shutil.copytree(ASSET, directory)
    draw = torch.Generator().manual_seed(0)
    values = load_file(directory / "model.safetensors")
    for name, value in values.items():
        noise = torch.randn(value.shape, generator=draw) * value.float().std()
        values[name] = value + (0.1 * noise).to(value.dtype) if value.dim() > 1 else value
    save_file(values, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def diagnose(
    cli: ForkedCli, efficient: object, out: Path, *more: object, prelude: str = ""
) -> Finished:
    words = ["diagnose", "--original", "tiny_reasoner", "--efficient", efficient, "--out", out]
    return cli.run([*words, *SMALL, *more], prelude)


@pytest.fixture(scope="module")
def whole(cli: ForkedCli, efficient: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A diagnosis that nothing disturbed."""
    out = tmp_path_factory.mktemp("diagnosis") / "whole"
    ended = diagnose(cli, efficient, out)
    assert ended.exit_code == 0, ended.stderr
    assert "tiny_reasoner against efficient: " in ended.stdout
    return out


def read_summary(out: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


def outputs(out: Path) -> dict[str, bytes]:
    """All that must not depend on how it came about."""
    names = ("tokens.jsonl", "summary.json", "tokens.html")
    return {name: (out / name).read_bytes() for name in names}


def error_of(ended: Finished) -> str:
    """The one error line."""
    assert ended.exit_code == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    return line


def test_every_token_of_every_response_is_there(whole: Path) -> None:
    there = {path.name for path in whole.iterdir()}
    assert there == {"manifest.json", "responses", *outputs(whole)}
    responses = list(read_responses(whole))
    assert len(responses) == NUM_RESPONSES
    for each in responses:
        assert "".join(each.tokens).rstrip().endswith("sentence｜>")
        assert min(each.kl) >= 0 and max(each.kl) > 0
        assert each.outcome in ("correct", "wrong", "no_answer")
        for found in each.alternatives:
            probabilities = [p for _, p in found.preferred]
            assert probabilities == sorted(probabilities, reverse=True)


def test_the_summary_is_of_those_tokens(whole: Path) -> None:
    summary, responses = read_summary(whole), list(read_responses(whole))
    every = [kl for each in responses for kl in each.kl]
    assert summary["num_tokens"] == len(every)
    assert summary["mean_kl"] == pytest.approx(sum(every) / len(every))
    assert summary["max_kl"] == max(every) == summary["largest"][0]["kl"]
    for name in ("kinds", "by_position", "by_relative_position"):
        rows = summary[name]
        assert sum(row["tokens"] for row in rows) == len(every)
        total = sum(row["tokens"] * row["mean_kl"] for row in rows)
        assert total == pytest.approx(sum(every))
    assert sum(row["share"] for row in summary["kinds"]) == pytest.approx(1)
    high = [kl for kl in every if kl >= summary["high_kl"]]
    assert summary["num_high"] == len(high)
    assert sum(row["count"] for row in summary["words"]) == len(high)
    assert sum(row["kl"] for row in summary["words"]) == pytest.approx(sum(high))
    found = sorted(each.kl[at.position] for each in responses for at in each.alternatives)
    assert [row["kl"] for row in summary["largest"]] == found[::-1][:NUM_LARGEST]
    by_key = {(each.problem_id, each.sample_index): each for each in responses}
    for row in summary["largest"]:
        response = by_key[row["problem_id"], row["sample_index"]]
        assert response.tokens[row["position"]] == row["text"]
        assert response.kl[row["position"]] == row["kl"]


def test_killed_and_continued_is_the_same(
    cli: ForkedCli, efficient: Path, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for prelude in (KILLED_WHILE_SAMPLING, KILLED.format(left=1), KILLED.format(left=4)):
        assert diagnose(cli, efficient, out, prelude=prelude).exit_code == -9
        assert not (out / "summary.json").exists()
    with open(out / "tokens.jsonl", "ab") as torn:  # as a failing machine leaves it
        torn.write(b'{"problem_id": "p')
    assert (out / "tokens.jsonl").read_bytes().count(b"\n") == 5
    ended = diagnose(cli, efficient, out, prelude=KILLED.format(left=NUM_RESPONSES - 5))
    assert ended.exit_code == -9  # at the last one: those that were there were not read again
    ended = diagnose(cli, efficient, out)
    assert ended.exit_code == 0, ended.stderr
    assert outputs(out) == outputs(whole)


def test_a_model_and_itself_from_stored_responses(
    cli: ForkedCli, whole: Path, tmp_path: Path
) -> None:
    more = ["--responses", whole / "responses"]
    ended = diagnose(cli, "tiny_reasoner", tmp_path / "out", *more)
    assert ended.exit_code == 0, ended.stderr
    summary = read_summary(tmp_path / "out")
    assert summary["max_kl"] == 0 and summary["largest"] == [] == summary["words"]
    assert summary["num_tokens"] == read_summary(whole)["num_tokens"]
    assert summary["num_responses"] == NUM_RESPONSES


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--original", "/nowhere"], "--original=/nowhere"),
        (["--responses", "/nowhere"], "--responses /nowhere: not an evaluation"),
        (["--benchmarks", "gsm9k"], "'gsm9k' is not known"),
        (["--data", "mine=/nowhere.jsonl"], "/nowhere.jsonl"),
        (["--max-tokens", "5000"], "set max_tokens="),
        (["--tp", "2"], "tp"),
    ],
)
def test_bad_options_are_one_line(
    cli: ForkedCli, tmp_path: Path, efficient: Path, options: list[str], words: str
) -> None:
    assert words in error_of(diagnose(cli, efficient, tmp_path / "out", *options))
    assert not (tmp_path / "out/tokens.jsonl").exists()


def test_ranks_models_and_directories_that_do_not_fit_are_one_line(
    cli: ForkedCli, efficient: Path, whole: Path, tmp_path: Path
) -> None:
    before = outputs(whole)
    ranks = "import os; os.environ['WORLD_SIZE'] = '2'"
    ended = diagnose(cli, efficient, tmp_path / "out", prelude=ranks)
    assert "diagnose is one process, and 2 were started" in error_of(ended)
    assert "a diagnosis with efficient=" in error_of(diagnose(cli, "tiny_reasoner", whole))
    assert "holds something else" in error_of(
        diagnose(cli, efficient, whole / "responses", "--overwrite")
    )
    assert outputs(whole) == before
    changed = Path(shutil.copytree(efficient, tmp_path / "model"))
    path = changed / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 590}))
    assert "590" in error_of(diagnose(cli, changed, tmp_path / "out"))


@pytest.mark.parametrize(
    "change",
    [
        lambda row: row | {"kl": row["kl"][1:]},
        lambda row: {key: value for key, value in row.items() if key != "tokens"},
        lambda row: row | {"kl": None},
        lambda row: row | {"alternatives": [{"position": 1}]},
    ],
)
def test_bad_lines_are_named(whole: Path, tmp_path: Path, change: Any) -> None:
    first, second, *_ = (whole / "tokens.jsonl").read_text().splitlines()
    lines = [first, json.dumps(change(json.loads(second)))]
    (tmp_path / "tokens.jsonl").write_text("\n".join([*lines, '{"problem_id": "torn']))
    with pytest.raises(UserError, match=r"tokens\.jsonl:2: not a diagnosed response"):
        list(read_responses(tmp_path))
