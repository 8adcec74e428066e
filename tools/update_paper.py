"""Writes tables, figures and verdicts of docs/paper.md from a study's table.json.

bash examples/paper.sh && python tools/update_paper.py runs/paper_tiny
"""

import argparse
import re
from pathlib import Path

from paper.figures import draw_all
from paper.rows import Rows
from paper.tables import tables

from megatron_opsft.study.study_file import read_study

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
STUDY = ROOT / "examples/studies/paper_tiny.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", type=Path, help="directory that the study was made in")
    args = parser.parse_args()
    rows = Rows(args.study / "table.json")
    page = DOCS / "paper.md"
    text = page.read_text(encoding="utf-8")
    for name, block in tables(rows, read_study(STUDY).study).items():
        marks = f"<!-- {name} -->", f"<!-- end of {name} -->"
        between = re.compile(f"({marks[0]}\n).*({marks[1]})", re.DOTALL)
        text, found = between.subn(lambda m, b=block: f"{m[1]}\n{b}\n\n{m[2]}", text)
        assert found == 1, f"{page} has no block {name}"
    page.write_text(text, encoding="utf-8")
    for path in draw_all(rows, DOCS):
        print(path)


if __name__ == "__main__":
    main()
