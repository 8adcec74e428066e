"""What a run reads before it computes anything: model directory, tokenizer, problems."""

import logging
from dataclasses import dataclass
from pathlib import Path

from megatron_opsft.architectures.config_from_hf import read_model_shape
from megatron_opsft.config import Config
from megatron_opsft.data.problem_cache import Encode, share_problems
from megatron_opsft.data.problems import (
    ProblemSet,
    describe_bad_rows,
    drop_unusable_prompts,
    load_held_out,
    load_problems,
    shuffled_subset,
)
from megatron_opsft.data.prompts import (
    PromptEncoder,
    check_vocabulary,
    end_token_ids,
    load_tokenizer,
)
from megatron_opsft.errors import UserError
from megatron_opsft.evaluate.held_out import HeldOut
from megatron_opsft.methods.facts import ReferenceStatistics
from megatron_opsft.methods.references import check_monitor, check_references, read_references
from megatron_opsft.methods.updates import MethodRun
from megatron_opsft.model.checks import check_layout
from megatron_opsft.rollout.engine import SamplingSettings
from megatron_opsft.rollout.limits import check_lengths
from megatron_opsft.runtime.versions import untested_versions
from megatron_opsft.storage.model_paths import resolve_model

log = logging.getLogger("megatron_opsft")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInput:
    """What a run reads before it computes anything."""

    model_dir: Path
    encoder: PromptEncoder
    end_tokens: tuple[int, ...]
    problems: ProblemSet


def read_input(config: Config) -> RunInput:
    """Errors: `UserError` for a model, tokenizer or data that cannot be trained with."""
    if config.method.has_fixed_data:
        raise UserError(
            f"method.name={config.method.name} learns from a fixed data set, and none can be read "
            "yet; choose a method that samples"
        )
    model_dir = resolve_model(config.model.path)
    tokenizer = load_tokenizer(model_dir)
    encoder = PromptEncoder(tokenizer=tokenizer, template=config.data.template)
    shape = read_model_shape(model_dir)
    end_tokens = end_token_ids(tokenizer, model_dir)
    check_vocabulary(tokenizer, end_tokens, shape.vocab_size, model_dir)
    check_layout(shape, config.parallel)
    check_lengths(config, shape.max_position_embeddings)
    problems, encoder = share_problems(
        config.data, encoder, model_dir, lambda encode: _load_problems(config, encode)
    )
    return RunInput(model_dir=model_dir, encoder=encoder, end_tokens=end_tokens, problems=problems)


def open_method(config: Config, given: RunInput, held_out: HeldOut | None) -> MethodRun:
    """Errors: `UserError` for missing lengths of the reference model, and for problems that a
    method would be tuned and evaluated on.
    """
    problems = given.problems.problems
    references: dict[str, ReferenceStatistics] = {}
    if (path := getattr(config.method, "references", None)) is not None:
        references = read_references(path)
        check_references(references, (problem.id for problem in problems), path)
    method = MethodRun(config.method, seed=config.run.seed, references=references)
    if held_out is not None and (size := method.monitor_size()) is not None:
        monitor = shuffled_subset(problems, size[0], seed=0)
        check_monitor((p.text for p in monitor), (p.text for p in held_out.problems))
    return method


def _load_problems(config: Config, encode: Encode) -> ProblemSet:
    loaded = load_problems(
        config.data.train,
        split=config.data.split,
        subset=config.data.subset,
        problem_field=config.data.problem_field,
        answer_field=config.data.answer_field,
    )
    usable = drop_unusable_prompts(loaded, encode, config.data.max_prompt_tokens)
    if not usable.problems:
        raise UserError(
            f"{config.data.train}: every prompt is longer than data.max_prompt_tokens="
            f"{config.data.max_prompt_tokens}; raise it"
        )
    return usable


def read_held_out(config: Config, given: RunInput, *, is_main: bool) -> HeldOut | None:
    """The held-out problems, if there are any; is_main: bad rows are said."""
    held_out = load_held_out(config.data, config.eval)
    if held_out is None:
        return None
    held_out = drop_unusable_prompts(held_out, given.encoder.encode, config.data.max_prompt_tokens)
    if is_main and (bad := describe_bad_rows(held_out)):
        log.warning("held out: %s", bad)
    return HeldOut(
        problems=shuffled_subset(held_out.problems, config.eval.num_problems, seed=0),
        settings=SamplingSettings(
            temperature=config.eval.temperature,
            top_p=config.eval.top_p,
            max_response_tokens=(
                config.eval.max_response_tokens or config.rollout.max_response_tokens
            ),
            end_token_ids=given.end_tokens,
        ),
        samples_per_problem=config.eval.samples_per_problem,
    )


def warn_of(config: Config, problems: ProblemSet) -> None:
    """Say what the user should know before anything is computed."""
    if untested := untested_versions():
        log.warning(untested)
    if bad := describe_bad_rows(problems):
        log.warning(bad)
    if config.rollout.temperature != 1.0:
        log.warning(
            "rollout.temperature=%s: sampling is then not on-policy; the paper saw training "
            "collapse at 0.3 and 0.6 and diverge at 1.2 and 1.5. Use 1.0.",
            config.rollout.temperature,
        )
