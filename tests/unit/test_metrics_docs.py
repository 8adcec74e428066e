"""docs/results.md names everything that a run writes, and nothing else."""

import gzip
import json
import re
from pathlib import Path

from forked_cli import ROOT, ForkedCli
from small_run import QUICKSTART, SMALL_RUN

SECTIONS = re.split(r"^## ", (ROOT / "docs/results.md").read_text(), flags=re.MULTILINE)[1:]


def documented(section: str) -> set[str]:
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {key for cell in cells for key in re.findall(r"`(\w+)`", cell)}


# Of vLLM: vllm/test_speculative.py. Of self-distillation: gloo/test_methods_run.py.
ELSEWHERE = {"spec_acceptance", "spec_tokens_per_draft", "num_pairs_left_out"}


def test_every_key_is_documented(cli: ForkedCli, tmp_path: Path) -> None:
    """Of a run that has every kind of key."""
    keys = ["method.name=grpo", "method.beta=0.1", "method.updates_per_batch=2", "run.steps=1"]
    keys += ["eval.max_response_tokens=64"]
    ended = cli.run(["train", QUICKSTART, *SMALL_RUN, *keys, f"run.dir={tmp_path}"])
    assert ended.exit_code == 0, ended.stderr
    rollouts = gzip.decompress((tmp_path / "rollouts/step_000001.jsonl.gz").read_bytes())
    written = [
        (tmp_path / "metrics.jsonl").read_bytes(),
        (tmp_path / "evals.jsonl").read_bytes(),
        rollouts,
    ]
    for section, lines in zip(SECTIONS, written, strict=True):
        assert documented(section) - ELSEWHERE == set(json.loads(lines.splitlines()[0]))
