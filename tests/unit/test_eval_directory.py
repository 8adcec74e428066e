"""The directory of an evaluation: what it remembers of its samples, and what it refuses."""

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from forked_cli import ROOT, Finished, ForkedCli
from rows import write_rows

from megatron_opsft.errors import UserError
from megatron_opsft.evaluate.inputs import open_model
from megatron_opsft.evaluate.settings import EvaluationDirectory

ROPE = {"rope_type": "default", "rope_theta": 123456.0}
SMALL = ["samples=1", "max_tokens=40", "device=cpu"]


def enter(directory: Path, identity: dict[str, Any], *, overwrite: bool = False) -> None:
    """As each start of an evaluation does."""
    EvaluationDirectory(directory).begin({"identity": identity}, overwrite=overwrite)


def test_a_lack_of_processes_is_not_taken_for_another_writer(tmp_path: Path) -> None:
    """A fork that the system refuses has the same type as a lock that is held."""
    out = EvaluationDirectory(tmp_path)
    with pytest.raises(BlockingIOError), out.locked():
        raise BlockingIOError(11, "Resource temporarily unavailable")
    with out.locked(), pytest.raises(UserError, match="in use by process"), out.locked():
        pass


def test_overwrite_removes_a_link_and_not_what_it_leads_to(tmp_path: Path) -> None:
    out, scratch = tmp_path / "out", tmp_path / "scratch"
    out.mkdir()
    scratch.mkdir()
    (scratch / "kept").touch()
    enter(out, {"data": {"mini": "d1"}})
    (out / "samples").symlink_to(scratch)
    (out / "table.md").symlink_to(tmp_path / "gone")
    enter(out, {"data": {"mini": "d2"}}, overwrite=True)
    assert [path.name for path in out.iterdir()] == ["manifest.json"]
    assert (scratch / "kept").exists()


def edited_model(path: Path, file: str, **changes: object) -> dict[str, Any]:
    """The identity of the shipped model with another value in one of its JSON files."""
    model = Path(shutil.copytree(ROOT / "megatron_opsft/assets/tiny_reasoner", path))
    text = (model / file).read_text()
    (model / file).write_text(json.dumps(json.loads(text) | changes))
    return open_model(str(model)).identity() | {"data": {}}


def test_a_model_read_otherwise_is_another_model(tmp_path: Path) -> None:
    """Rotary base and end tokens decide samples, and no weight shows them."""
    same = edited_model(tmp_path / "same", "config.json")
    for _ in range(2):
        enter(tmp_path, same)
    (ended, *_) = same["end_tokens"]
    for file, change, words in (
        ("config.json", {"rope_parameters": ROPE}, r"shape\.rope_theta=.*, not 123456\.0"),
        ("generation_config.json", {"eos_token_id": [ended, ended + 1]}, "end_tokens="),
    ):
        other = edited_model(tmp_path / words[:3], file, **change)
        with pytest.raises(UserError, match=words):
            enter(tmp_path, other)


def test_a_baseline_on_other_problems_is_refused_before_anything_is_sampled(
    cli: ForkedCli, tmp_path: Path
) -> None:
    """By the data's hash, by the number of problems, and by what is missing; so are samples that
    were there, by the hash.
    """
    first, second = (
        write_rows(tmp_path / f"{n}.jsonl", [{"problem": f"{n} + 1?", "answer": a} for a in "12"])
        for n in range(2)
    )
    base, out = tmp_path / "base", tmp_path / "out"

    def evaluate(out: Path, data: str, *more: object) -> Finished:
        words = ["eval", "model=tiny_reasoner", f"out={out}", f"data.mini={data}", *SMALL]
        return cli.run([*words, *more])

    def refusal(data: str, *more: str) -> str:
        line = evaluate(out, data, "--baseline", base, *more).error
        assert f"--baseline {base}: " in line
        assert not (out / "samples").exists()
        return line

    assert evaluate(base, first).exit_code == 0
    assert "data.mini=" in evaluate(base, second).error
    assert "its samples of mini are not of the 2 problems of" in refusal(second)
    assert "its samples of mini are not of the 1 problems of" in refusal(first, "limit=1")
    lines = gzip.decompress((base / "samples/mini.jsonl.gz").read_bytes()).splitlines(True)
    (base / "samples/mini.jsonl.gz").write_bytes(gzip.compress(lines[0]))
    assert "are incomplete: 1 are missing" in refusal(first)
