"""What a resumed run must keep, and its hash: every key that is not marked `FREE`."""

import hashlib
import json
from pathlib import Path
from typing import Any

from megatron_opsft.config import Config
from megatron_opsft.config_section import FREE
from megatron_opsft.errors import UserError

_LAST_STEP = "optimizer.schedule=cosine reaches min_lr at the last step, so the rate would jump"
# A run chooses these itself unless the user sets them.
_CHOSEN = ("data.max_prompt_tokens", "eval.max_response_tokens")


def config_hash(config: Config) -> str:
    """A hash of what decides a run's numbers: all but how long, where and on what it runs."""
    return hashlib.sha256(json.dumps(_kept(config), sort_keys=True).encode()).hexdigest()[:16]


def check_resumable(before: Config, now: Config, directory: Path) -> None:
    """Errors: `UserError` naming a key whose change would make the resumed run another one."""
    old, new = _kept(before), _kept(now)
    for key, value in new.items():
        section, name = key.split(".")
        keys = getattr(now, section)
        is_set = getattr(keys, name) is not None and name in keys.model_fields_set
        if value == old.get(key) or (key in _CHOSEN and not is_set):
            continue
        why = f" ({_LAST_STEP})" if key == "run.steps" else ""
        raise UserError(
            f"{directory} was started with {key}={old.get(key)!r}, not {value!r}: a resumed run "
            f"must keep it{why}; set it back, or start a new run in another run.dir"
        )


def _kept(config: Config) -> dict[str, Any]:
    """`section.key` -> value. A cosine schedule makes every learning rate depend on `run.steps`."""
    kept = {
        f"{section}.{key}": value
        for section, values in config.model_dump(mode="json").items()
        if FREE not in type(config).model_fields[section].metadata
        for key, value in values.items()
        if FREE not in type(getattr(config, section)).model_fields[key].metadata
    }
    if config.optimizer.schedule == "cosine":
        kept["run.steps"] = config.run.steps
    return kept
