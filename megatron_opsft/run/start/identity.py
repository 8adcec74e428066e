"""What a run must find again when it is resumed, besides its configuration: the same problems,
model, judge, and whatever else its numbers come from.
"""

import hashlib
from pathlib import Path

from megatron_opsft.config import Config
from megatron_opsft.config.load import load_config
from megatron_opsft.data.problems import held_out_source, sha256_of
from megatron_opsft.errors import HubUnreachable, log
from megatron_opsft.models.storage.model_identity import (
    FileHashes,
    combined,
    hash_adapter_files,
    hash_model_files,
    tokenizer_sha256,
)
from megatron_opsft.models.storage.model_paths import (
    has_hf_weights,
    in_cache,
    is_dist_checkpoint,
    local_model,
)
from megatron_opsft.records import JsonObject
from megatron_opsft.run.start.checked_run import CheckedRun
from megatron_opsft.run.start.input import RunInput, read_input
from megatron_opsft.run.start.run_directory import RunDir
from megatron_opsft.runtime.owned_directory import (
    OTHER_JUDGE,
    OTHER_PROBLEMS,
    OTHER_TOKENIZER,
    OTHER_WEIGHTS,
    describe_change,
)
from megatron_opsft.verify.verifier import describe_judge

# Part of the identity -> what it is a hash of; {} stands for its place.
_WORDS = {
    "data_sha256": OTHER_PROBLEMS,
    "held_out_sha256": "the held-out problems in {} are not those",
    "model.weights_sha256": OTHER_WEIGHTS,
    "model.tokenizer_sha256": OTHER_TOKENIZER,
    "judge": OTHER_JUDGE,
    "responses_sha256": "the responses in {} are not those",
    "adapter_sha256": "the adapter in {} is not the one",
    "references_sha256": "the lengths in {} are not those",
    "example_prompt": "the prompts of {} are not those",
}


def identity_of(run_input: RunInput, config: Config, hashes: FileHashes) -> JsonObject:
    """Return the `identity` of the manifest. hashes: those of the model's files."""
    encoder = run_input.encoder
    held_out_sets = {"eval": run_input.held_out, **run_input.more_held_out}
    verify, responses = config.verify, config.data.responses
    identity: JsonObject = {
        # Reference and teacher are this model too: the run began with it.
        "model": {
            "weights_sha256": combined(hashes),
            "tokenizer_sha256": tokenizer_sha256(
                run_input.model_dir, encoder.tokenizer
            ),
        },
        "data_sha256": run_input.problems.sha256,
        "held_out_sha256": {
            name: sha256_of(held_out.problems)
            for name, held_out in held_out_sets.items()
            if held_out is not None
        },
        "judge": describe_judge(verify, "") if verify.own_judge else verify.judge,
        "responses_sha256": None if responses is None else _sha256_of(responses),
    }
    adapter = config.model.adapter
    if adapter is not None:
        identity["adapter_sha256"] = combined(hash_adapter_files(Path(adapter)))
    references = config.method.reference_file
    if references:
        identity["references_sha256"] = _sha256_of(references)
    identity["example_prompt"] = encoder.example
    if run_input.teacher is not None:
        identity["example_prompt"] += run_input.teacher.example
    return identity


def check_same_run(identity: JsonObject, run_input: RunInput, config: Config) -> None:
    """Errors: `UserError` saying in words what of the identity is not as in the run that run.dir
    holds, if it holds one, with its place then and now.
    """
    run_dir = RunDir(config.run.dir)

    def explain(name: str) -> str:
        before = load_config(run_dir.path / "config.yaml")
        part = name.partition(".")[0]
        words = _WORDS.get(name) or _WORDS.get(part, "")
        if not words:
            return ""
        place = _place_of(name, config), _place_of(name, before)
        text = describe_change(words, *place, run_dir.kind)
        repeats = any(row.is_repeat for row in run_input.bad_rows)
        if name == "held_out_sha256.eval" and repeats:
            text += "; earlier releases also evaluated a held-out problem's other rows"
        return text

    # What runs of earlier versions did not write down cannot be compared.
    run_dir.check_same(identity, growing="model", explain=explain)


def check_finished(checked: CheckedRun) -> None:
    """Check that a finished run is resumed as itself. Nothing is fetched: without the files of its
    model there is nothing to compare. Errors: `UserError` as of `read_input` and `check_same_run`.
    """
    config = checked.config
    earlier = RunDir(config.run.dir).read_manifest() or {}
    if not earlier.get("identity"):
        return
    model = config.model.path
    model_dir = local_model(model) or in_cache(model)
    if model_dir is None or not (
        has_hf_weights(model_dir) or is_dist_checkpoint(model_dir)
    ):
        log.info("%s is not here: model and data are not compared", model)
        return
    try:
        run_input = read_input(checked, model_dir)
    except HubUnreachable as error:
        log.info("model and data are not compared: %s", error)
        return
    hashes = hash_model_files(model_dir, earlier.get("model_files", {}))
    check_same_run(identity_of(run_input, config, hashes), run_input, config)


def _place_of(name: str, config: Config) -> str:
    """Return where a part of the identity comes from, as the configuration names it."""
    data, model = config.data, config.model
    part, _, inner = name.partition(".")
    match part:
        case "data_sha256":
            selected = data.pass_rate_from and f"selected by {data.pass_rate_from}"
            template = data.template if data.template.endswith(".jinja") else ""
            asked = template and f"asked with {template}"
            return ", ".join(map(str, filter(None, [data.name, selected, asked])))
        case "held_out_sha256":
            return _held_out_place(inner, config)
        case "judge":
            return config.verify.judge
        case "responses_sha256":
            return str(data.responses)
        case "adapter_sha256":
            return str(model.adapter)
        case "references_sha256":
            return str(config.method.reference_file)
        case "example_prompt":
            return f"{model.path} (data.template={data.template})"
    return model.path


def _held_out_place(name: str, config: Config) -> str:
    """Return where a set of held-out problems comes from. name: `eval`, or that of a set of
    eval.more.
    """
    if name == "eval" and config.eval.holdout:
        return f"{config.data.name} (eval.holdout={config.eval.holdout})"
    sources = {more.name: more.data for more in config.eval.more}
    sources["eval"] = held_out_source(config.data, config.eval) or "nothing"
    return sources.get(name, "nothing")


def _sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
