"""The directory of an evaluation: what it remembers of its samples, and what it refuses."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from forked_cli import Finished, ForkedCli

from megatron_opsft.errors import UserError
from megatron_opsft.evaluate.directory import open_directory, read_manifest, write_manifest

SMALL = ["--samples", "1", "--max-tokens", "40", "--device", "cpu"]


def identity(**data: str) -> dict[str, Any]:
    return {"temperature": 0.6, "data": data}


def enter(directory: Path, identified: dict[str, Any]) -> None:
    """As each start of an evaluation does."""
    open_directory(directory, identified, overwrite=False)
    write_manifest(directory, {"model": "m", "identity": identified})


def test_the_data_of_a_benchmark_is_remembered_whatever_is_evaluated_in_between(
    tmp_path: Path,
) -> None:
    for data in ({"mini": "d1"}, {"other": "x"}, {"third": "y"}):
        enter(tmp_path, identity(**data))
    remembered = read_manifest(tmp_path)["identity"]["data"]
    assert remembered == {"mini": "d1", "other": "x", "third": "y"}
    with pytest.raises(UserError, match=r'data\.mini="d1", not "d2"'):
        open_directory(tmp_path, identity(mini="d2"), overwrite=False)
    enter(tmp_path, identity(mini="d1"))


def write_problems(path: Path, *answers: str) -> Path:
    rows = [{"id": str(n), "problem": f"{n} + 1?", "answer": a} for n, a in enumerate(answers)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def evaluate(cli: ForkedCli, out: Path, *options: object) -> Finished:
    return cli.run(["eval", "--model", "tiny_reasoner", "--out", out, *SMALL, *options])


def error_of(ended: Finished) -> str:
    """The one error line."""
    assert ended.exit_code == 2, ended.stderr
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    return line


def rows_of(out: Path, benchmark: str) -> list[dict[str, Any]]:
    text = gzip.decompress((out / f"samples/{benchmark}.jsonl.gz").read_bytes())
    return [json.loads(line) for line in text.splitlines()]


def test_samples_from_other_data_are_refused_by_name(cli: ForkedCli, tmp_path: Path) -> None:
    """By the data's hash; and by each sample's gold answer where a manifest lost the hash."""
    first = write_problems(tmp_path / "first.jsonl", "1", "2")
    second = write_problems(tmp_path / "second.jsonl", "1", "3")
    fewer = write_problems(tmp_path / "fewer.jsonl", "1")
    out = tmp_path / "out"
    for name in ("mini", "other"):
        assert evaluate(cli, out, "--data", f"{name}={first}").exit_code == 0
    stored = rows_of(out, "mini")
    assert "data.mini=" in error_of(evaluate(cli, out, "--data", f"mini={second}"))
    manifest = json.loads((out / "manifest.json").read_text())
    del manifest["identity"]["data"]["mini"]
    (out / "manifest.json").write_text(json.dumps(manifest))
    line = error_of(evaluate(cli, out, "--data", f"mini={second}"))
    assert "samples of mini from other data: the answer of problem 1 is '2', '3' in" in line
    line = error_of(evaluate(cli, out, "--data", f"mini={fewer}"))
    assert "samples of mini from other data: a sample of problem 1, which is not in" in line
    assert evaluate(cli, out, "--data", f"mini={first}").exit_code == 0
    assert rows_of(out, "mini") == stored
