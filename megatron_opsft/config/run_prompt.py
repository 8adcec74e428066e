"""How a run prompted its model, and which judge it used: a command that continues with the model does
the same, unless the user says otherwise.
"""

import json
import logging
import os
from collections.abc import Collection, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron_opsft.config.yaml_text import parse_yaml
from megatron_opsft.errors import UserError

log = logging.getLogger("megatron_opsft")

# In which section a run has them; an evaluation has them without one.
SECTIONS = {"template": "data", "system_prompt": "data", "judge": "verify"}


def settings_of_run(
    model: str, now: Mapping[str, object], given: Collection[str]
) -> dict[str, Any]:
    """The template, system_prompt and judge of the run that trained a model, as far as they differ
    from `now` and the user has not `given` them; {} for a model of no run.

    model: as a user writes it. A log line says what is taken, and what differs from the run.
    Errors: `UserError` for a run whose config.yaml cannot be read, and for a judge that is a
    function: a file beside a model must not choose code to be run.
    """
    if (run := _run_of(Path(model).expanduser())) is None:
        return {}
    file = run / "config.yaml"
    try:
        tree = parse_yaml(file.read_text(encoding="utf-8"))
        trained = {key: tree[section][key] for key, section in SECTIONS.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None
    taken = {key: v for key, v in trained.items() if v != now[key] and key not in given}
    if ":" in str(function := taken.get("judge", "")):
        raise UserError(
            f"{model} was judged by the function {function}, says {file}: give judge={function} "
            "(of a run: verify.judge) to have it judge here as well, or judge=math"
        )
    for key, value in trained.items():
        if value != now[key]:
            what = (
                f"taken from {file}"
                if key in taken
                else f"not {json.dumps(now[key])} as here"
            )
            _say(f"{model} was trained with {key}={json.dumps(value)}, {what}")
    return taken


def _run_of(directory: Path) -> Path | None:
    """The directory of the run that wrote a model or a checkpoint: it is one, or is in one."""
    directory = directory.absolute()
    if directory.name == "hf":
        directory = directory.parent
    elif directory.parent.name in ("checkpoints", "best"):
        directory = directory.parent.parent
    files = (directory / "config.yaml", directory / "manifest.json")
    return directory if all(file.is_file() for file in files) else None


@lru_cache  # a configuration is read several times
def _say(line: str) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        log.info(line)
