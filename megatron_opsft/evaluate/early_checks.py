"""What can be known of an evaluation before anything heavy is imported."""

from pathlib import Path

from megatron_opsft.data.prompt_file import open_prompt_file
from megatron_opsft.data.sources import check_source
from megatron_opsft.errors import UserError
from megatron_opsft.evaluate.directory import MANIFEST, read_manifest
from megatron_opsft.evaluate.settings import EvalSettings
from megatron_opsft.rollout.limits import check_engine_settings, check_installed
from megatron_opsft.storage.model_paths import local_model
from megatron_opsft.verify.verifier import check_judge


def check_settings(settings: EvalSettings) -> None:
    """Errors: `UserError` for a start that cannot succeed. Needs neither torch nor a network."""
    check_engine_settings(settings.engine, settings.tp, section="")
    check_installed(settings.engine, section="")
    local_model(settings.model, option="--model")
    baseline = settings.baseline
    if baseline is not None and not (Path(baseline).expanduser() / "results.json").is_file():
        local_model(baseline, option="--baseline")
    for source in settings.data.values():
        check_source(source)
    if settings.out.is_file():
        raise UserError(f"--out {settings.out} is a file; name a directory")
    if (settings.out / MANIFEST).is_file():
        read_manifest(settings.out)
    open_prompt_file(settings.template, option="template")
    check_judge(settings.verify)
