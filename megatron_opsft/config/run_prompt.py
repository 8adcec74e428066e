"""The prompt and the judge that a run used. A command that continues with the run's model uses the
same ones, unless the user says otherwise.
"""

import json
import os
from collections.abc import Collection, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from megatron_opsft.config.yaml_text import parse_yaml
from megatron_opsft.errors import UserError, log
from megatron_opsft.section import TemplateArguments, is_other_json

_ARGUMENTS: TypeAdapter[Any] = TypeAdapter(TemplateArguments)
SECTIONS = {
    "template": "data",
    "system_prompt": "data",
    "chat_template": "data",
    "template_arguments": "data",
    "judge": "verify",
}
"""Key -> its section in a run's configuration; an evaluation's settings have no sections."""


def settings_of_run(
    model: str, now: Mapping[str, object], given: Collection[str]
) -> dict[str, Any]:
    """Return the values that the keys of SECTIONS had in the run that trained a model: those that
    differ from `now` and that the user has not set himself. {} for a model that no run wrote.

    model: as a user writes it. now: the current value of every key. given: keys that the user set.
    A log line tells what is taken from the run, and what stays different from it.
    Errors: `UserError` for a run whose config.yaml cannot be read, and for a judge that is a
    function: a file beside a model must not choose code to be run.
    """
    run = find_run(Path(model).expanduser())
    if run is None:
        return {}
    file = run / "config.yaml"
    try:
        tree = parse_yaml(file.read_text(encoding="utf-8"))
        # Runs of earlier releases do not have these two keys.
        tree["data"].setdefault("chat_template", None)
        arguments = tree["data"].get("template_arguments")
        tree["data"]["template_arguments"] = _ARGUMENTS.validate_python(arguments)
        trained = {key: tree[section][key] for key, section in SECTIONS.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None
    different = {
        key: value for key, value in trained.items() if is_other_json(value, now[key])
    }
    taken = {key: value for key, value in different.items() if key not in given}
    function = str(taken.get("judge", ""))
    if ":" in function:
        raise UserError(
            f"{model} was judged by the function {function}, says {file}: give judge={function} "
            "(of a run: verify.judge) to have it judge here as well, or judge=math"
        )
    for key, value in different.items():
        origin = f"not {json.dumps(now[key])} as here"
        if key in taken:
            origin = f"taken from {file}"
        _log_once(f"{model} was trained with {key}={json.dumps(value)}, {origin}")
    return taken


def find_run(directory: Path) -> Path | None:
    """Return the directory of the run that wrote a model or a checkpoint; None if no run did.

    directory: the run's own, its `hf` or `adapter`, or a checkpoint of the run.
    """
    directory = directory.absolute()
    if directory.name in ("hf", "adapter"):
        directory = directory.parent
    elif directory.parent.name in ("checkpoints", "best"):
        directory = directory.parent.parent
    for name in ("config.yaml", "manifest.json"):
        if not (directory / name).is_file():
            return None
    return directory


@lru_cache  # a configuration is read several times
def _log_once(line: str) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        log.info(line)
