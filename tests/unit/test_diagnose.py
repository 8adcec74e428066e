"""`megatron-opsft diagnose` as users call it, on the shipped model and a disturbed copy of it."""

import json
import shutil
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from forked_cli import ROOT, Finished, ForkedCli
from made_diagnosis import make_diagnosis
from made_runs import HARM
from rows import write_rows
from safetensors.torch import load_file, save_file

from megatron_opsft.diagnose.page import read_responses, write_page
from megatron_opsft.errors import UserError

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
    responses = list(read_responses(whole))
    assert len(responses) == NUM_RESPONSES
    for each in responses:
        assert "".join(each.tokens).rstrip().endswith("sentence｜>")
        assert min(each.kl) >= 0 and max(each.kl) > 0
        assert each.outcome in ("correct", "wrong", "no_answer")
        for found in each.alternatives:
            probabilities = [p for _, p in found.preferred]
            assert probabilities == sorted(probabilities, reverse=True)
    kl = [value for each in responses for value in each.kl]
    first, *rows = write_page(whole, "tiny_reasoner", "efficient").splitlines()
    assert f"{len(kl):,} tokens of 12 responses, D_t {fmean(kl):.4f} nats" in first
    columns = [row.replace(",", "").replace(" %", "").split()[-4:] for row in rows[3:]]
    tokens, _, shares, large = ([float(n) for n in column] for column in zip(*columns, strict=True))
    assert sum(tokens) == len(kl) and sum(shares) == pytest.approx(100, abs=0.5)
    assert sum(large) == sum(value >= np.quantile(kl, 0.95) for value in kl)


def test_the_page_is_made_of_the_tokens(tmp_path: Path) -> None:
    """Texts that mean harm stay texts; D_t may be 0 everywhere, as of a model and itself."""
    made = make_diagnosis(tmp_path)
    assert "60 tokens of 4 responses" in write_page(made, "long", "short")
    page = (made / "report.html").read_text()
    assert "<h1>long against short</h1>" in page and page.count("<pre>") == 4
    assert page.count('class="k9" title="D = 5; efficient: &#39;&lt;/think&gt;&#39; 90 %') == 1
    assert HARM[:20] not in page and page.count("</script") == 2
    rows = [json.loads(line) for line in (made / "tokens.jsonl").read_text().splitlines()]
    write_rows(made / "tokens.jsonl", [row | {"kl": [0.0] * len(row["kl"])} for row in rows])
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
    ended = diagnose(cli, efficient, out, prelude=KILLED.format(left=NUM_RESPONSES - 5))
    assert ended.exit_code == -9  # at the last one: those that were there were not read again
    ended = diagnose(cli, efficient, out)
    assert ended.exit_code == 0, ended.stderr
    assert outputs(out) == outputs(whole)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--original", "/nowhere"], "--original=/nowhere"),
        (["--benchmarks", "gsm9k"], "'gsm9k' is unknown"),
        (["--max-tokens", "5000"], "set max_tokens="),
    ],
)
def test_bad_options_are_one_line(
    cli: ForkedCli, tmp_path: Path, efficient: Path, options: list[str], words: str
) -> None:
    assert words in diagnose(cli, efficient, tmp_path / "out", *options).error
    assert not (tmp_path / "out/tokens.jsonl").exists()


def test_ranks_models_and_directories_that_do_not_fit_are_one_line(
    cli: ForkedCli, efficient: Path, whole: Path, tmp_path: Path
) -> None:
    before = outputs(whole)
    ranks = "import os; os.environ['WORLD_SIZE'] = '2'"
    ended = diagnose(cli, efficient, tmp_path / "out", prelude=ranks)
    assert "diagnose runs as one process, but 2 were started" in ended.error
    assert "a diagnosis with efficient=" in diagnose(cli, "tiny_reasoner", whole).error
    assert (
        "holds something other"
        in diagnose(cli, efficient, whole / "responses", "--overwrite").error
    )
    assert outputs(whole) == before
    changed = Path(shutil.copytree(efficient, tmp_path / "model"))
    path = changed / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 590}))
    assert "590" in diagnose(cli, changed, tmp_path / "out").error


@pytest.mark.parametrize(
    "change",
    [
        lambda row: row | {"kl": row["kl"][1:]},
        lambda row: row | {"alternatives": [{"position": 1}]},
    ],
)
def test_bad_lines_are_named(whole: Path, tmp_path: Path, change: Any) -> None:
    first, second, *_ = (whole / "tokens.jsonl").read_text().splitlines()
    lines = [first, json.dumps(change(json.loads(second)))]
    (tmp_path / "tokens.jsonl").write_text("\n".join([*lines, '{"problem_id": "torn']))
    with pytest.raises(UserError, match=r"tokens\.jsonl:2: not a diagnosed response"):
        list(read_responses(tmp_path))
