"""Describes a run: its manifest.json, its summary.json, and the cards of its models."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_opsft.config import Config
from megatron_opsft.config.load import find_changes
from megatron_opsft.config.training import describe_lora
from megatron_opsft.models.storage.model_identity import (
    FileHashes,
    hash_model_files,
)
from megatron_opsft.records import JsonObject, Message
from megatron_opsft.run.run_files import (
    Line,
    best_evaluation,
    describe_decline,
    is_skipped,
    read_json_lines,
)
from megatron_opsft.run.start.identity import identity_of
from megatron_opsft.run.start.run_directory import BEST
from megatron_opsft.run.start.session import Session, log
from megatron_opsft.runtime.distributed import broadcast_object
from megatron_opsft.runtime.durable import step_name
from megatron_opsft.runtime.formatting import count_of, percent, tokens
from megatron_opsft.runtime.intervals import (
    describe_evidence,
    interval_of_points,
    share_interval,
)
from megatron_opsft.runtime.libraries import installed_versions
from megatron_opsft.runtime.phase import enter_phase


def make_manifest(session: Session, earlier: Mapping[str, Any]) -> JsonObject:
    """Describe what a run is made of. Called by every rank.

    Its `identity` must stay the same when the run is resumed, besides the configuration.
    earlier: on rank 0 the manifest of the run that is resumed, else {}; model files whose hash it
    has are not read again unless they changed.
    """
    config = session.config
    enter_phase("reading the model's files for their hash")
    hashes: FileHashes = {}
    if session.layout.is_main:
        hashes = hash_model_files(session.model_dir, earlier.get("model_files", {}))
    hashes = broadcast_object(hashes)
    return {
        "versions": installed_versions(),
        "data": session.problems.name,
        "model_files": hashes,
        "identity": identity_of(session, config, hashes),
        "num_problems": len(session.problems.problems),
        "num_bad_rows": len(session.problems.bad_rows),
        "model": str(config.model.path),
        "world_size": session.layout.world_size,
    }


def note_adjustments(
    before: Config, config: Config, versions: Mapping[str, str], last_step: int
) -> list[JsonObject]:
    """List what changed when a run was resumed, for its manifest, and warn of each change.

    Changes are those of keys and of versions of libraries. before, versions: configuration and
    libraries until now. last_step: the last step with them.
    """
    changes = find_changes(before, config)
    now = installed_versions()
    if versions:  # earlier releases did not write them
        for library, _ in sorted(versions.items() ^ now.items()):
            changes[library] = versions.get(library), now.get(library)
    adjusted = []
    for name, (old, new) in changes.items():
        log.warning(
            "%s=%s from step %d on; until now it was %s", name, new, last_step + 1, old
        )
        adjusted.append(
            {"key": name, "before": old, "now": new, "after_step": last_step}
        )
    return adjusted


# Values of an evaluation that the summary has, without the prefix `eval_`.
_MEASURED = ("accuracy", "mean_response_tokens", "samples")


def read_evaluations(directory: Path) -> list[JsonObject]:
    """Return the lines of evals.jsonl of a run. Errors: those of `read_json_lines`."""
    required = [f"eval_{key}" for key in _MEASURED]
    return read_json_lines(directory / "evals.jsonl", required=required)


def summarize(
    config: Config,
    evaluations: Sequence[Line],
    step: int,
    model_step: int,
    kept_step: int = 0,
) -> JsonObject:
    """Return the content of summary.json: accuracy and length before, after and at best; steps.

    evaluations: the lines of evals.jsonl. step: the last one of the run. model_step: the step of
    the model that it exports. kept_step: the step of the best evaluation if best/ has its model,
    else 0. Errors: those of `read_json_lines`.
    """
    required = ("trained_tokens", "step_seconds")
    steps = read_json_lines(config.run.dir / "metrics.jsonl", required=required)
    base = evaluations[0] if evaluations else {}
    final = evaluations[-1] if evaluations else {}
    summary: JsonObject = {"base": _measured(base), "final": _measured(final)}
    best = best_evaluation(evaluations, config.eval)
    if best:
        model = None  # the folder of its model in the run's directory, if it was kept
        if best["step"] == kept_step != 0:
            model = f"{BEST}/{step_name(kept_step)}"
        elif best["step"] == model_step != 0:
            model = "hf"
        rule = f"eval.best={config.eval.best}: {config.eval.best_rule}"
        summary["best"] = _measured(best) | {
            "step": best["step"],
            "rule": rule,
            "model": model,
        }
    return summary | {
        "steps": step,
        "model_step": model_step,
        "skipped_steps": sum(map(is_skipped, steps)),
        "seconds": sum(line["step_seconds"] for line in steps),
    }


def _measured(evaluation: Mapping[str, Any]) -> JsonObject:
    """Return the measured values of a line of evals.jsonl; None for each that it lacks."""
    return {key: evaluation.get(f"eval_{key}") for key in _MEASURED}


_CARD = """---
library_name: transformers
tags: [on-policy-sft, {config.method.name}]
---
# {name}

{config.model.path} after {steps} of {method} on {data}.

| held-out problems | before | after |
|---|---|---|
| mean response tokens | {before[1]} | {after[1]} |
| accuracy | {before[0]} | {after[0]} |
{evidence}{best}
```python
from transformers import pipeline

answer = pipeline("text-generation", "{place}")
messages = [
{messages}
]
print(answer(messages, {arguments}max_new_tokens=1024)[0]["generated_text"][-1]["content"])
```

These are the messages of a problem it was trained on. Its prompts in training looked like this:

`````
{prompt}
`````
"""


_LOADS_ADAPTER = """from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer, pipeline

model = AutoPeftModelForCausalLM.from_pretrained({place})
tokenizer = AutoTokenizer.from_pretrained({base})
answer = pipeline("text-generation", model, tokenizer=tokenizer)
"""


def model_card(
    summary: Mapping[str, Any], config: Config, messages: Sequence[Message], prompt: str
) -> str:
    """Return the README.md of the model in hf/: Markdown with the Hugging Face hub's header.

    messages: those of an example problem, with everything that training adds. prompt: their text
    under the chat template.
    """
    exported = summary["final"]
    if summary["model_step"] != summary["steps"]:
        exported = summary["best"]
    best = ""
    if "best" in summary:
        step, figures = summary["best"]["step"], _cells(summary["best"])
        best = (
            f"\nThe best evaluation, by {config.eval.best_rule}: after {count_of([step], 'step')}, "
            f"{figures[1]} tokens, accuracy {figures[0]}.\n"
        )
    return _CARD.format(
        **_about_run(config, messages, prompt),
        steps=count_of([summary["model_step"]], "step"),
        name=config.run.dir.name,
        place=config.export.push_to_hub or config.run.dir / "hf",
        before=_cells(summary["base"]),
        after=_cells(exported),
        evidence=_evidence(summary["base"], exported),
        best=best,
    )


def card_of_adapter(card: str, base: str, place: Path) -> str:
    """Return the README.md of a LoRA adapter: the card of the model into which it is merged, but
    for the header and for how it is loaded.

    base: the model that it is added to, as adapter_config.json names it. place: its directory.
    """
    of_adapter = f"base_model: {json.dumps(base)}\nlibrary_name: peft\n"
    card = card.replace("library_name: transformers\n", of_adapter, 1)
    before, found, rest = card.partition("from transformers import pipeline\n")
    _, _, behind = rest.partition('")\n')  # the line that loads the model
    loads = _LOADS_ADAPTER.format(base=json.dumps(base), place=json.dumps(str(place)))
    return before + loads + behind if found else card


def card_of_best(
    evaluations: Sequence[Line],
    config: Config,
    messages: Sequence[Message],
    prompt: str,
) -> str:
    """Return the README.md of a model in best/, with the figures of its own evaluation.

    evaluations: the lines of evals.jsonl until then, of which the last is the best. messages,
    prompt: see `model_card`.
    """
    base, chosen = _measured(evaluations[0]), _measured(evaluations[-1])
    step = int(evaluations[-1]["step"])
    name = step_name(step)
    return _CARD.format(
        **_about_run(config, messages, prompt),
        steps=count_of([step], "step"),
        name=f"{config.run.dir.name}, {name}",
        place=config.run.dir / BEST / name,
        before=_cells(base),
        after=_cells(chosen),
        evidence=_evidence(base, chosen),
        best=f"\nChosen after step {step} as the best of {len(evaluations)} evaluations until "
        f"then, by {config.eval.best_rule} (`eval.best={config.eval.best}`).\n",
    )


def _about_run(
    config: Config, messages: Sequence[Message], prompt: str
) -> dict[str, Any]:
    """Return what the cards of all models of a run share. Arguments: see `model_card`."""
    messages_as_json = [
        f"    {json.dumps(message._asdict(), ensure_ascii=False)},"
        for message in messages
    ]
    method = f"`{config.method.name}`"
    if config.method.length_of == "thinking":
        method += " by the length of the thinking"
    if config.lora.rank:
        method += f" ({describe_lora(config.lora)})"
    arguments = ""
    if config.data.template_arguments is not None:
        arguments = f"tokenizer_encode_kwargs={config.data.template_arguments}, "
    return {
        "config": config,
        "method": method,
        "data": ", ".join(source.path for source in config.data.sources),
        "messages": "\n".join(messages_as_json),
        "arguments": arguments,
        "prompt": prompt,
    }


def _evidence(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Say on how many responses the card's table rests, how sure its gain of accuracy is, and if
    the model got worse; "" if nothing was evaluated.
    """
    keys = ("accuracy", "samples")
    if any(end.get(key) is None for end in (before, after) for key in keys):
        return ""
    low, high = share_interval(
        before["accuracy"], before["samples"], after["accuracy"], after["samples"]
    )
    interval = interval_of_points(before["accuracy"], low, high)
    n = f"{count_of([before['samples'], after['samples']], 'response')} at each end"
    evidence = describe_evidence(n, interval, holds_zero=low <= 0 <= high)
    difference = 100 * (after["accuracy"] - before["accuracy"])
    text = f"\nAccuracy: {difference:+.1f} points; {evidence}.\n"
    if decline := describe_decline(before, after, prefix=""):
        text += f"\n**{decline}.**\n"
    return text


def _cells(measured: Mapping[str, Any]) -> tuple[str, str]:
    """Return accuracy and length of an evaluation as text; "-" if nothing was evaluated."""
    if measured["accuracy"] is None:
        return "-", "-"
    return percent(measured["accuracy"]), tokens(measured["mean_response_tokens"])
