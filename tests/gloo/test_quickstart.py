"""The quickstart, from its first to its last step."""

import re
from pathlib import Path

import pytest
from forked_cli import ROOT, ForkedCli
from small_run import QUICKSTART

BLOCK = re.compile(
    r"mean response tokens +([0-9.]+) +([0-9.]+) +-([0-9.]+) %\n"
    r" *accuracy +([0-9.]+) % +([0-9.]+) % +([-+][0-9.]+) points"
)


@pytest.mark.timeout(1300)
def test_the_quickstart_ends_as_the_readme_says(cli: ForkedCli, tmp_path: Path) -> None:
    """All of it. Another CPU adds in another order, so that a few answers differ."""
    # A minute alone; here beside other tests.
    ended = cli.start(["train", QUICKSTART, f"run.dir={tmp_path}"]).wait(1200)
    assert ended.exit_code == 0, ended.stderr
    shown = cli.run(["report", tmp_path]).stdout
    found, promised = (BLOCK.search(text) for text in (shown, (ROOT / "README.md").read_text()))
    assert found and promised, shown
    before, after, shorter, *accuracies = map(float, found.groups())
    assert shorter == pytest.approx(100 * (1 - after / before), abs=0.1)
    told = [float(value) for value in promised.groups()]
    assert [before, after, shorter] == pytest.approx(told[:3], rel=0.02)
    assert accuracies == pytest.approx(told[3:], abs=0.5)
