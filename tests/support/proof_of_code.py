"""The proof of tools/gpu_proof.sh on stages that are pieces of Python instead of its own.

    python proof_of_code.py '{"NAME": {"code": "...", "modules": [...], ...}, ...}' [OPTION ...]

A stage may also have `expected_seconds`, `limit_seconds`, `gpus`, and `tests` for code that writes
a JUnit file instead of printing a report.
"""

import json
import signal
import sys
from typing import Any

from proof.command import prove
from proof.commands import Command, Stage
from proof.processes import adopt_orphans
from proof.readings import read_report, read_tests

from megatron_opsft.errors import UserError


def stage_of(name: str, given: dict[str, Any]) -> Stage:
    """The same on either device."""
    code, tests = given.pop("code"), given.pop("tests", False)
    command = Command(
        words=("-c", code.replace("{", "{{").replace("}", "}}"), "{work}"),
        read=(
            (lambda place: read_tests(place.work / "junit.xml"))
            if tests
            else (lambda place: read_report(place.logs.with_suffix(".out")))
        ),
        modules=tuple(given.pop("modules", ())),
        **{"expected_seconds": 0, "limit_seconds": 60, **given},
    )
    return Stage(name=name, proves=f"that {name} runs", on_gpu=command, on_cpu=command)


if __name__ == "__main__":
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    stages = [stage_of(name, given) for name, given in json.loads(sys.argv[1]).items()]
    try:
        sys.exit(prove(sys.argv[2:], stages))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
