"""Every script of tools/ and benchmarks/ explains itself, and does nothing else when asked for
--help.
"""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from forked_cli import ROOT

FILES = sorted([*ROOT.glob("tools/*.py"), *ROOT.glob("benchmarks/*.py")])
SCRIPTS = [file for file in FILES if '"__main__"' in file.read_text(encoding="utf-8")]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_help(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.syspath_prepend(str(script.parent))
    monkeypatch.setattr(Path, "write_text", lambda *a, **k: pytest.fail("it writes"))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown.lower().startswith("usage") and len(shown.splitlines()) >= 3


@pytest.mark.parametrize("script", sorted(ROOT.glob("t*s/*.sh")), ids=lambda path: path.stem)
def test_a_shell_script_explains_itself_and_installs_nothing(script: Path) -> None:
    words, environment = ["bash", script, "--help"], {"PATH": "/bin:/usr/bin"}
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=20)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.strip() or script.stem == "find_python"  # sourced, never run
