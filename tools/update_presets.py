"""Writes what `megatron-opsft plan` says of the shipped configurations: into their head comments,
and for the methods into docs/methods.md.
"""

import argparse
from pathlib import Path

from megatron_opsft.plan.presets import has_block, with_figures, with_methods_table

ROOT = Path(__file__).parents[1]
PRESETS = ROOT / "examples" / "configs"


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    for path in sorted(PRESETS.glob("*.yaml")):
        if has_block(path.read_text(encoding="utf-8")):
            path.write_text(with_figures(path), encoding="utf-8")
    page = ROOT / "docs" / "methods.md"
    table = with_methods_table(page.read_text(encoding="utf-8"), PRESETS / "methods")
    page.write_text(table, encoding="utf-8")


if __name__ == "__main__":
    main()
