"""Writes the generated table of all keys into docs/config.md."""

import argparse
from pathlib import Path

from megatron_opsft.commands.command_line import reference_table

PAGE = Path(__file__).parents[1] / "docs/config.md"
START, END = "<!-- config reference -->", "<!-- end of config reference -->"


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    before, rest = PAGE.read_text(encoding="utf-8").split(START)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{START}\n{reference_table()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
