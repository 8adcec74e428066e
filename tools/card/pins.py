"""What constraints/borrowed-card.txt says: which packages, in which versions.

Usage: python tools/card/pins.py has|brought|vllm - print the lines of one section, for pip.
"""

import re
import sys
from pathlib import Path

FILE = Path(__file__).parents[2] / "constraints/borrowed-card.txt"


def read_pins(section: str) -> list[str]:
    """Lines such as `numpy==2.5.2` below the heading `# == SECTION: ...`."""
    lines = FILE.read_text(encoding="utf-8").splitlines()
    pins = []
    heading = ""
    for line in lines:
        if line.startswith("# == "):
            heading = line.removeprefix("# == ").partition(":")[0]
        elif line and heading == section:
            pins.append(line)
    return pins


def canonical(package: str) -> str:
    """A package's name in the one spelling that all its others stand for."""
    return re.sub(r"[-_.]+", "-", package).lower()


if __name__ == "__main__":
    print("\n".join(read_pins(sys.argv[1])))
