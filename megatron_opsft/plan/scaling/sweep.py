"""The cases of a sweep: every number of ranks with every combination of what is varied, and real
runs of them.
"""

import itertools
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_opsft.errors import UserError

Scaling = Literal["strong", "weak", "both"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepCase:
    """overrides: section.key=value, on top of the configuration file."""

    ranks: int
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of a directory."""
        parts = [part.replace("=", "_").replace("/", "_") for part in self.overrides]
        return "-".join([f"ranks_{self.ranks}", *parts])


def parse_ranks(text: str) -> list[int]:
    """ "1,2,4" in ascending order. Errors: `UserError`."""
    try:
        ranks = sorted({int(part) for part in text.split(",")})
    except ValueError:
        ranks = []
    if not ranks or ranks[0] < 1:
        raise UserError(f"--ranks={text} must be numbers of ranks such as 8,16,32")
    return ranks


def parse_vary(text: str) -> list[tuple[str, ...]]:
    """`parallel.tp=1,2`: one override for each value; `parallel.tp,parallel.pp=4x1,4x2`: several
    keys that change together. Errors: `UserError`.
    """
    names, _, values = text.partition("=")
    keys = names.split(",")
    if not values or not all(keys):
        raise UserError(f"--vary {text} must be KEY=VALUE,VALUE or KEY,KEY=VALUExVALUE,...")
    cases = []
    for value in values.split(","):
        parts = value.split("x") if len(keys) > 1 else [value]
        if len(parts) != len(keys):
            raise UserError(
                f"--vary {text}: {value} gives {len(parts)} values for {len(keys)} keys"
            )
        cases.append(tuple(f"{k}={v}" for k, v in zip(keys, parts, strict=True)))
    return cases


def make_cases(
    ranks: Sequence[int], vary: Sequence[str], prompts_per_step: int, scaling: Scaling
) -> Iterator[SweepCase]:
    """strong: the configuration's prompts on any number of ranks; weak: they grow with the ranks,
    from the configuration's on the fewest. No case comes twice.
    """
    combinations = list(itertools.product(*(parse_vary(text) for text in vary)))
    for number, choice in itertools.product(ranks, combinations):
        overrides = tuple(itertools.chain.from_iterable(choice))
        if scaling != "weak" or number == ranks[0]:
            yield SweepCase(ranks=number, overrides=overrides)
        if scaling != "strong" and number != ranks[0]:
            if any(override.startswith("data.prompts_per_step=") for override in overrides):
                raise UserError(
                    "--vary data.prompts_per_step and weak scaling exclude each other; give "
                    "--scaling strong"
                )
            grown = prompts_per_step * number // ranks[0]
            yield SweepCase(ranks=number, overrides=(*overrides, f"data.prompts_per_step={grown}"))


def start_run(config: Path, case: SweepCase, run_dir: Path, overrides: Sequence[str]) -> None:
    """Train to the end on this machine, through torchrun; a run that is there is continued, and a
    finished one is left as it is.

    Its output goes to RUN_DIR.log. Errors: `UserError` naming the log, where the run fails.
    """
    if (run_dir / "summary.json").is_file():
        return
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=localhost"),
        *("--nproc-per-node", str(case.ranks), "-m", "megatron_opsft", "train", str(config)),
        *(*overrides, *case.overrides, f"run.dir={run_dir}", "--resume=auto"),
    ]
    log = run_dir.with_name(run_dir.name + ".log")
    with open(log, "a", encoding="utf-8") as output:
        code = subprocess.run(command, stdout=output, stderr=output, check=False).returncode
    if code:
        raise UserError(f"{case.name}: the run ended with exit code {code}; see {log}")
