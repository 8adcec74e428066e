"""Uploads the model of a finished run to the Hugging Face hub.

huggingface_hub alone reads the token, from HF_TOKEN or its login; nothing here passes it on.
"""

import re
import shlex
from pathlib import Path

from megatron_opsft.config import Config
from megatron_opsft.errors import UserError, first_line, log
from megatron_opsft.run.run_files import read_summary
from megatron_opsft.runtime.durable import write_json, write_text
from megatron_opsft.runtime.phase import enter_phase, let_signals_end

# The key of summary.json with the repository that has the model.
_UPLOADED_TO = "uploaded_to"


def is_upload_due(config: Config) -> bool:
    """True if a finished run is to upload its model, and has not uploaded it there.

    Errors: those of `read_summary`.
    """
    name = config.export.push_to_hub
    return name is not None and read_summary(config.run.dir).get(_UPLOADED_TO) != name


def push_to_hub(config: Config) -> None:
    """Upload hf/ with its card to `export.push_to_hub`, if that is due; a repository that does not
    exist is made. Called on rank 0, when the run is finished and its processes are closed.

    A failure is a warning with the command that uploads later: the run is finished all the same.
    A signal ends the process at once; the command was said before.
    """
    name = config.export.push_to_hub
    if name is None or not is_upload_due(config):
        return
    directory = config.run.dir / "hf"
    command = f"hf upload {name} {shlex.quote(str(directory))} ."
    if config.export.private:
        command += " --private"
    enter_phase(f"uploading to {name}")
    log.info("uploading %s to %s; if it is interrupted: %s", directory, name, command)
    let_signals_end()
    try:
        url = _upload(config, name)
    except Exception as error:  # of the hub, the network, or huggingface_hub
        log.warning(
            "%s was not uploaded to %s: %s; later: %s",
            directory,
            name,
            first_line(error),
            command,
        )
        return
    log.info("uploaded to %s", url)
    summary = config.run.dir / "summary.json"
    try:
        write_json(summary, read_summary(config.run.dir) | {_UPLOADED_TO: name})
    except (OSError, UserError) as error:
        log.warning("%s does not say so: %s", summary, first_line(error))


def _upload(config: Config, name: str) -> str:
    """Upload hf/; return the address of the repository.

    Errors: `UserError` if the repository exists and is public, and `export.private` is set; those
    of huggingface_hub.
    """
    from huggingface_hub import HfApi

    hub = HfApi()
    url = hub.create_repo(name, private=config.export.private, exist_ok=True)
    if config.export.private and not hub.model_info(name).private:
        raise UserError(f"{url} is public, and export.private=true")
    _name_in_card(config.run.dir / "hf" / "README.md", name)
    hub.upload_folder(
        repo_id=name,
        folder_path=config.run.dir / "hf",
        commit_message=f"Model of {config.run.dir.name}",
    )
    return str(url)


def _name_in_card(card: Path, name: str) -> None:
    """Let the example of a model's card load the repository `name`: the run may have finished
    before it was known.
    """
    if not card.is_file():
        return
    before = card.read_text(encoding="utf-8")
    after = re.sub(
        r'(?m)^(answer = pipeline\("text-generation", )".*"\)$', rf'\1"{name}")', before
    )
    if after != before:
        write_text(card, after)
