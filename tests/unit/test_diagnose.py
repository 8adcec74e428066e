"""`megatron-opsft diagnose` as users call it, on the shipped model and a disturbed copy of it."""

import json
import shutil
from pathlib import Path
from statistics import fmean

import pytest
import torch
from forked_cli import ROOT, Finished, ForkedCli
from made_diagnosis import make_diagnosis
from made_runs import HARM
from rows import write_rows
from safetensors.torch import load_file, save_file

from megatron_opsft.diagnose.page import write_page
from megatron_opsft.runtime.durable import json_lines

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
from megatron_opsft.evaluate import benchmarks
benchmarks.SampleFiles.combine = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
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


def outputs(out: Path) -> dict[str, bytes]:
    """All that must not depend on how it came about."""
    return {name: (out / name).read_bytes() for name in ("tokens.jsonl", "report.html")}


def test_every_token_of_every_response_is_there_and_counted(whole: Path) -> None:
    there = {path.name for path in whole.iterdir()}
    assert there == {"manifest.json", "responses", *outputs(whole)}
    rows = list(json_lines(whole / "tokens.jsonl"))
    assert len(rows) == NUM_RESPONSES
    for row in rows:
        assert "".join(row["tokens"]).rstrip().endswith("sentence｜>")
        assert len(row["kl"]) == len(row["tokens"])
        assert min(row["kl"]) >= 0 and max(row["kl"]) > 0
        assert row["outcome"] in ("correct", "wrong", "no_answer") and row["alternatives"]
    kl = [value for row in rows for value in row["kl"]]
    first, *lines = write_page(whole, "tiny_reasoner", "efficient").splitlines()
    assert f"{len(kl):,} tokens of 12 responses, D_t {fmean(kl):.4f} nats" in first
    rows_said = [line.replace(",", "").replace(" %", "") for line in lines if line[-1:] == "%"]
    columns = [line.split()[-3:] for line in rows_said]
    tokens, _, shares = ([float(n) for n in column] for column in zip(*columns, strict=True))
    assert sum(tokens) == len(kl) and sum(shares) == pytest.approx(100, abs=0.5)


def test_the_page_is_made_of_the_tokens(tmp_path: Path) -> None:
    """Texts that mean harm stay texts; D_t may be 0 everywhere, as of a model and itself."""
    made = make_diagnosis(tmp_path)
    assert "60 tokens of 4 responses" in write_page(made, "long", "short")
    page = (made / "report.html").read_text()
    assert "<h1>long against short</h1>" in page and page.count("<pre>") == 4
    assert page.count('class="k9" title="D = 5; efficient: &#39;&lt;/think&gt;&#39; 90 %') == 1
    assert HARM[:20] not in page and page.count("</script") == 2
    rows = [row | {"kl": [0.0] * len(row["kl"])} for row in json_lines(made / "tokens.jsonl")]
    write_rows(made / "tokens.jsonl", rows)
    assert "0.0000 nats" in write_page(made, "long", "short")


def test_killed_and_continued_is_the_same(
    cli: ForkedCli, efficient: Path, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for prelude in (KILLED_WHILE_SAMPLING, KILLED.format(left=5)):
        assert diagnose(cli, efficient, out, prelude=prelude).exit_code == -9
        assert not (out / "report.html").exists()
    with open(out / "tokens.jsonl", "ab") as torn:  # as a failing machine leaves it
        torn.write(b'{"problem_id": "p')
    assert (out / "tokens.jsonl").read_bytes().count(b"\n") == 5
    # To the end of all but those that were there: they were not read again.
    ended = diagnose(cli, efficient, out, prelude=KILLED.format(left=NUM_RESPONSES - 4))
    assert ended.exit_code == 0, ended.stderr
    assert outputs(out) == outputs(whole)


def test_what_does_not_fit_is_one_line(
    cli: ForkedCli, efficient: Path, whole: Path, tmp_path: Path
) -> None:
    before, out = outputs(whole), tmp_path / "out"
    bad = diagnose(cli, efficient, out, "--original", "/nowhere").error
    assert "--original=/nowhere" in bad and not out.exists()
    assert "unknown config key limits" in diagnose(cli, efficient, out, "--limits", "3").error
    assert "a diagnosis with efficient=" in diagnose(cli, "tiny_reasoner", whole).error
    other = diagnose(cli, efficient, whole, "temperature=0.7")
    assert "with temperature=0.6, not 0.7" in other.error
    nested = diagnose(cli, efficient, whole / "responses", "--overwrite")
    assert "holds something other" in nested.error
    assert outputs(whole) == before
    changed = Path(shutil.copytree(efficient, tmp_path / "model"))
    path = changed / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 590}))
    assert "590" in diagnose(cli, changed, out).error
