"""Writes the generated references of all keys into docs/config.md and docs/evaluation.md."""

import argparse
from pathlib import Path

from megatron_opsft.command_line import reference_table
from megatron_opsft.config import Config
from megatron_opsft.evaluate.settings import EvalSettings

DOCS = Path(__file__).parents[1] / "docs"
START, END = "<!-- config reference -->", "<!-- end of config reference -->"


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    for name, model in (("config.md", Config), ("evaluation.md", EvalSettings)):
        page = DOCS / name
        before, rest = page.read_text(encoding="utf-8").split(START)
        after = rest.split(END)[1]
        table = reference_table(model)
        page.write_text(f"{before}{START}\n{table}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
