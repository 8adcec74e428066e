"""docs/cluster.md says what the job scripts do: their variables, defaults and files."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs/cluster.md").read_text(encoding="utf-8")
SCRIPTS = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "slurm").glob("*.sh")}


def test_every_setting_of_the_scripts_is_in_the_table() -> None:
    named = set()
    for text in SCRIPTS.values():
        named |= set(re.findall(r"^(?:export )?([A-Z_]+)=\$\{\1:[-?]", text, re.MULTILINE))
    assert {"CONFIG", "MODEL", "VENV", "MAX_RESTARTS", "HF_HOME"} <= named
    internal = {"JOB"}
    in_table = set(re.findall(r"`([A-Z_]+)`", DOCS))
    assert named - internal - in_table == set()


def test_figures_are_those_of_the_scripts() -> None:
    common, train = SCRIPTS["common.sh"], SCRIPTS["train.sh"]
    assert "MAX_RESTARTS=${MAX_RESTARTS:-3}" in common and "| `MAX_RESTARTS` | 3 |" in DOCS
    assert "15000 + (" in common and "% 17000" in common and "15000 to 31999" in DOCS
    assert "#SBATCH --signal=USR1@900" in train and "`#SBATCH --signal=USR1@900`" in DOCS


def test_files_that_commands_name_exist() -> None:
    named = re.findall(r"(slurm/[\w.]+\.sh)", DOCS)
    assert len(named) >= 8
    assert [name for name in named if not (ROOT / name).is_file()] == []
