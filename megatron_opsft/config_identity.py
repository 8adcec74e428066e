"""The hash of what decides a run, and what a resumed run must keep."""

import hashlib
import json
from pathlib import Path

from megatron_opsft.config import Config
from megatron_opsft.errors import UserError
from megatron_opsft.methods.aggregation import EARLIER_NAMES
from megatron_opsft.methods.catalog.on_policy_sft import ON_POLICY_SFT

_NOT_HASHED = (
    "dir",
    "tensorboard",
    "wandb",
    "wandb_project",
    "export_every",
    "show_samples",
    "save_rollouts",
    "save_logprobs",
    "max_minutes",
    "hang_minutes",
    "silence_seconds",
)


_LATER_KEYS: tuple[tuple[str, str, object], ...] = (
    ("data", "duplicates", "keep"),
    ("data", "pass_rate", None),
    ("data", "pass_rate_from", None),
    ("data", "responses", None),
    ("data", "system_prompt", ""),
    ("eval", "best_within", 0.01),
    ("eval", "export_best", False),
    ("eval", "holdout", 0),
    ("eval", "more", []),
    ("eval", "patience", 0),
    ("parallel", "ep", 1),
    ("parallel", "etp", None),
    ("rollout", "dealing", "auto"),
    ("rollout", "speculative", None),
    ("verify", "judge", "math"),
    ("verify", "judge_field", None),
)


def config_hash(config: Config) -> str:
    """A hash of what decides a run's numbers: all but where it is written and logged."""
    tree = config.model_dump(mode="json")
    for key in _NOT_HASHED:
        del tree["run"][key]
    del tree["checkpoint"], tree["model"]["load"]
    for section, key, default in _LATER_KEYS:  # at their defaults a run is what it was without
        if tree[section][key] == default:
            del tree[section][key]
    if config.method.name == ON_POLICY_SFT.name:  # as it was when there was no other
        earlier = {name: given for given, name in EARLIER_NAMES.items()}
        tree["train"]["normalization"] = earlier[tree.pop("method")["aggregation"]]
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]


# What may change when a run is resumed: where and how it runs, not what it computes.
_FREE_ON_RESUME = (
    "run.dir",
    "run.steps",
    "run.eval_every",
    "run.export_every",
    "run.show_samples",
    "run.save_rollouts",
    "run.save_logprobs",
    "run.tensorboard",
    "run.wandb",
    "run.wandb_project",
    "run.max_minutes",
    "run.hang_minutes",
    "run.silence_seconds",
    "model.load",
    "parallel.",
    "rollout.dealing",
    "checkpoint.",
    "eval.export_best",
    "eval.patience",
    "verify.workers",
    "train.max_tokens_per_microbatch",
    "train.recompute",
)

# What a run chooses where nobody says it.
_CHOSEN = ("data.max_prompt_tokens", "eval.max_response_tokens")

# ... but for `run.steps` where every learning rate depends on it.
_LAST_STEP = "optimizer.schedule=cosine reaches min_lr at the last step, so the rate would jump"


def check_resumable(before: Config, now: Config, directory: Path) -> None:
    """Errors: `UserError` naming a key whose change would make the resumed run another one."""
    old, new = before.model_dump(mode="json"), now.model_dump(mode="json")
    free = tuple(
        key for key in _FREE_ON_RESUME if key != "run.steps" or now.optimizer.schedule == "constant"
    )
    for section, values in new.items():
        for key, value in values.items():
            name, started = f"{section}.{key}", old[section].get(key)
            is_set = value is not None and key in getattr(now, section).model_fields_set
            chosen = name in _CHOSEN and not is_set
            if value != started and not name.startswith(free) and not chosen:
                why = f" ({_LAST_STEP})" if name == "run.steps" else ""
                raise UserError(
                    f"{directory} was started with {name}={started!r}, not {value!r}: a "
                    f"resumed run must keep it{why}; set it back, or start a new run in "
                    "another run.dir"
                )
