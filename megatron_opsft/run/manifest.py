"""manifest.json: what a run is made of, and whether a resumed one is the same."""

import json
from pathlib import Path

from megatron_opsft.config import Config
from megatron_opsft.config.identity import check_resumable, config_hash
from megatron_opsft.config.load import load_config
from megatron_opsft.errors import UserError
from megatron_opsft.runtime.versions import installed_versions
from megatron_opsft.session import Session


def manifest_of(session: Session) -> dict[str, object]:
    """What the run is made of."""
    return {
        "versions": installed_versions(),
        "config_hash": config_hash(session.config),
        "data": session.problems.name,
        "data_sha256": session.problems.sha256,
        "example_prompt": _example_prompt(session),
        "num_problems": len(session.problems.problems),
        "num_bad_rows": len(session.problems.bad_rows),
        "model": str(session.config.model.path),
        "world_size": session.layout.world_size,
    }


def _example_prompt(session: Session) -> str:
    """With the teacher's behind it, where there is one."""
    teacher = "" if session.teacher is None else session.teacher.example
    return session.sampler.encoder.example + teacher


def check_same_run(session: Session, directory: Path) -> None:
    """Errors: `UserError` where the run in the directory is another one than the session's."""
    before: Config = load_config(directory / "config.yaml")
    check_resumable(before, session.config, directory)
    manifest = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))
    if manifest["data_sha256"] != session.problems.sha256:
        raise UserError(
            f"{session.problems.name} is not the data that {directory} was trained on (its hash "
            "differs); restore the data, or start a new run"
        )
    if manifest["example_prompt"] != _example_prompt(session):
        raise UserError(
            f"the chat template of {session.model_dir} makes other prompts than those that "
            f"{directory} was trained on (example_prompt in its manifest.json); restore the "
            "template, or start a new run"
        )
