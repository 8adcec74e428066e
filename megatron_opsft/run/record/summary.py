"""What a run is made of, manifest.json; which of its evaluations is the best; what it did,
summary.json; and the card of its model, hf/README.md.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_opsft.config import Config
from megatron_opsft.config.load import changed
from megatron_opsft.data.problems import sha256_of
from megatron_opsft.models.storage.model_identity import (
    FileHashes,
    combined,
    hash_model_files,
    tokenizer_sha256,
)
from megatron_opsft.records import Message
from megatron_opsft.run.run_files import best_evaluation, is_skipped, read_json_lines
from megatron_opsft.run.start.session import Session, log
from megatron_opsft.runtime.distributed import broadcast_object
from megatron_opsft.runtime.formatting import percent, tokens
from megatron_opsft.runtime.libraries import installed_versions
from megatron_opsft.runtime.phase import enter_phase
from megatron_opsft.verify.verifier import describe_judge

Line = Mapping[str, Any]  # of evals.jsonl


def manifest_of(session: Session, earlier: Mapping[str, Any]) -> dict[str, Any]:
    """`identity` is what a resumed run must keep besides the keys of its configuration.

    earlier: the manifest that is there, on rank 0; files that it has hashes of are not read again
    unless they changed. Called by every rank.
    """
    config = session.config
    enter_phase("reading the model's files for their hash")
    hashes: FileHashes = {}
    if session.layout.is_main:
        hashes = hash_model_files(session.model_dir, earlier.get("model_files", {}))
    hashes = broadcast_object(hashes)
    held_out = {"eval": session.held_out, **session.more_held_out}
    judge, stored = config.verify, config.data.responses
    references: Path | None = getattr(config.method, "references", None)
    return {
        "versions": installed_versions(),
        "data": session.problems.name,
        "model_files": hashes,
        "identity": {
            # Also the reference's and the teacher's: both are what the run began with.
            "model": {
                "weights_sha256": combined(hashes),
                "tokenizer_sha256": tokenizer_sha256(
                    session.model_dir, session.sampler.encoder.tokenizer
                ),
            },
            "data_sha256": session.problems.sha256,
            "held_out_sha256": {
                name: sha256_of(s.problems) for name, s in held_out.items() if s
            },
            "judge": describe_judge(judge, "") if judge.own_judge else judge.judge,
            "responses_sha256": None if stored is None else _sha256_of_file(stored),
            **(
                {"references_sha256": _sha256_of_file(references)} if references else {}
            ),
            # With the teacher's behind it, where there is one.
            "example_prompt": session.sampler.encoder.example
            + ("" if session.teacher is None else session.teacher.example),
        },
        "num_problems": len(session.problems.problems),
        "num_bad_rows": len(session.problems.bad_rows),
        "model": str(config.model.path),
        "world_size": session.layout.world_size,
    }


def adjustments(
    before: Config, config: Config, versions: Mapping[str, str], last_step: int
) -> list[dict[str, Any]]:
    """What a run changed when it was resumed, for its manifest: keys, and versions of libraries. It
    warns of each.

    before, versions: its configuration and libraries until now. last_step: the last one with them.
    """
    found = changed(before, config)
    now = installed_versions()
    for library in sorted({*versions, *now} if versions else ()):
        if versions.get(library) != now.get(library):
            found[library] = versions.get(library), now.get(library)
    for name, (old, new) in found.items():
        log.warning(
            "%s=%s from step %d on; until now it was %s", name, new, last_step + 1, old
        )
    return [
        {"key": name, "before": old, "now": new, "after_step": last_step}
        for name, (old, new) in found.items()
    ]


def _sha256_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_MEASURED = ("accuracy", "mean_response_tokens", "samples")


def summarize(
    directory: Path, config: Config, step: int, model_step: int
) -> dict[str, Any]:
    """Accuracy and length before, after and at best, steps and seconds. Errors: as of
    `read_json_lines`.

    step: after which the run ended; model_step: of the model that it exports.
    """
    evaluations = read_json_lines(
        directory / "evals.jsonl", required=[f"eval_{key}" for key in _MEASURED]
    )
    required = ("trained_tokens", "step_seconds")
    steps = read_json_lines(directory / "metrics.jsonl", required=required)
    first, last = (evaluations[0], evaluations[-1]) if evaluations else ({}, {})
    summary: dict[str, Any] = {"base": _measured(first), "final": _measured(last)}
    best = best_evaluation(evaluations, config.eval.best_within)
    if best is not None:
        summary["best"] = _measured(best) | {"step": best["step"]}
    return summary | {
        "steps": step,
        "model_step": model_step,
        "skipped_steps": sum(map(is_skipped, steps)),
        "seconds": sum(line["step_seconds"] for line in steps),
    }


def _measured(evaluation: Line) -> dict[str, Any]:
    """None for each value that the evaluation lacks."""
    return {key: evaluation.get(f"eval_{key}") for key in _MEASURED}


_CARD = """---
library_name: transformers
tags: [on-policy-sft, {config.method.name}]
---
# {name}

{config.model.path} after {summary[model_step]} steps of `{config.method.name}` on {data}.

| held-out problems | before | after |
|---|---|---|
| mean response tokens | {before[1]} | {after[1]} |
| accuracy | {before[0]} | {after[0]} |

```python
from transformers import pipeline

answer = pipeline("text-generation", "{directory}")
messages = [
{messages}
]
print(answer(messages, max_new_tokens=1024)[0]["generated_text"][-1]["content"])
```

These are the messages of a problem it was trained on. Its prompts in training looked like this:

`````
{prompt}
`````
"""


def model_card(
    summary: Mapping[str, Any], config: Config, messages: Sequence[Message], prompt: str
) -> str:
    """Markdown with the Hugging Face hub's header.

    messages: a problem's, with all that training added; prompt: what the chat template makes of
    them.
    """
    after_training = summary["final"]
    if summary["model_step"] != summary["steps"]:
        after_training = summary["best"]
    before, after = (
        ("-", "-")
        if found["accuracy"] is None
        else (percent(found["accuracy"]), tokens(found["mean_response_tokens"]))
        for found in (summary["base"], after_training)
    )
    directory = Path(config.run.dir)
    return _CARD.format(
        config=config,
        summary=summary,
        data=", ".join(source.path for source in config.data.sources),
        name=directory.name,
        directory=directory / "hf",
        before=before,
        after=after,
        messages="\n".join(
            f"    {json.dumps(message._asdict(), ensure_ascii=False)},"
            for message in messages
        ),
        prompt=prompt,
    )
