"""docs/paper.md: figures and verdicts follow from the rows of a study."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_opsft.study.study_file import read_study

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from paper import rows, tables

    yield rows, tables
    for name in [name for name in sys.modules if name.split(".")[0] == "paper"]:
        del sys.modules[name]


def row(name: str, tokens: float, accuracy: float, seed: int = 0) -> dict[str, Any]:
    return {
        "section": "methods",
        "name": name,
        "seed": seed,
        "error": None,
        "accuracy": accuracy,
        "accuracy_interval": [accuracy - 0.02, accuracy + 0.02],
        "pass_at_n": 1.0,
        "tokens": tokens,
        "tokens_interval": None,
        "compression_ratio": tokens / 100,
        "efficiency": 1e4 * accuracy / tokens,
        "norm_std": 0.25,
        "training": None,
    }


def test_verdicts_follow_the_rows_and_what_is_missing_has_none(tool: Any, tmp_path: Path) -> None:
    rows, tables = tool
    made = [row("CoT", 100, 0.9), row("On-policy SFT", 20, 0.92), row("On-policy SFT", 30, 0.9, 1)]
    made += [row("CRST", 20, 0.91), row("CoD", 200, 0.5) | {"error": "torn"}]
    (tmp_path / "table.json").write_text(json.dumps(made))
    study = read_study(ROOT / "examples/studies/paper_tiny.yaml").study
    blocks = tables.tables(rows.Rows(tmp_path / "table.json"), study)
    claims = {line.split(" | ")[0][2:]: line.split(" | ") for line in blocks["claims"].split("\n")}
    shorter = claims["Much shorter at the same accuracy"]
    measured = "CoT: 100.0 tokens, 90.0 %; On-policy SFT: 25.0 tokens, 91.0 %"
    assert shorter[2:4] == [measured, "yes"]
    measured = "CRST: CR 20.0 %; On-policy SFT: CR 25.0 %"
    assert claims["CRST shortens less"][2:4] == [measured, "**no**"]
    assert claims["CoD shortens less"][2:4] == ["not made: CoD", "-"]
    methods = blocks["methods"].split("\n")
    assert len(methods) == 5 and "25.0 ± 5.0" in methods[3] and methods[3].endswith("| 2 |")
    assert "91.0 ± 1.0 [90.0, 94.0]" in methods[3] and "59.9 / 73.6 / 21.5 / 2.74" in methods[3]


def test_the_page_has_every_block_and_figure(tool: Any) -> None:
    page = (ROOT / "docs/paper.md").read_text(encoding="utf-8")
    for name in ("claims", "methods", "costs", "control", "ablations"):
        assert page.count(f"<!-- {name} -->") == page.count(f"<!-- end of {name} -->") == 1
