"""What a run reads before it computes anything: model directory, tokenizer, problems."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_opsft.config import Config, EvalConfig, RolloutConfig
from megatron_opsft.config.run import EvalSet
from megatron_opsft.data.mixture import (
    describe_data,
    drop_unusable_prompts,
    leave_out_held_out,
    load_training,
    take_held_out,
)
from megatron_opsft.data.problems import (
    BadRow,
    ProblemSet,
    fields_of,
    load_held_out,
    load_problems,
    shuffled_subset,
)
from megatron_opsft.data.prompts import (
    MODEL_OPTION,
    PromptEncoder,
    check_vocabulary,
    end_token_ids,
    load_tokenizer,
    teacher_of,
)
from megatron_opsft.data.stored_responses import StoredResponses, read_stored_responses
from megatron_opsft.errors import UserError
from megatron_opsft.methods.facts import (
    ReferenceStatistics,
    check_monitor,
    check_references,
    read_references,
)
from megatron_opsft.methods.updates import MethodRun
from megatron_opsft.models.architectures.shape import ModelShape
from megatron_opsft.rollout.engine import SamplingSettings
from megatron_opsft.rollout.limits import check_lengths
from megatron_opsft.run.held_out import HeldOut
from megatron_opsft.run.start.check import check_responses
from megatron_opsft.run.start.pass_rates import keep_by_pass_rate
from megatron_opsft.trainer.model.checks import check_layout, check_routing_replay


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInput:
    """What a run reads before it computes anything. teacher: its prompts, where the method has one;
    settings: how training samples; more_held_out: the sets of eval.more by name; bad_rows: what is
    left out, of the training data and of the held-out problems; notes: what the user should know.
    """

    model_dir: Path
    encoder: PromptEncoder
    teacher: PromptEncoder | None
    settings: SamplingSettings
    problems: ProblemSet
    held_out: HeldOut | None
    more_held_out: Mapping[str, HeldOut]
    stored: StoredResponses | None
    method: MethodRun
    bad_rows: tuple[BadRow, ...]
    notes: tuple[str, ...]


def read_input(config: Config, model_dir: Path, shape: ModelShape) -> RunInput:
    """Errors: `UserError` for a model, tokenizer or data that cannot be trained with."""
    tokenizer = load_tokenizer(model_dir)
    encoder = PromptEncoder(
        tokenizer=tokenizer,
        template=config.data.template,
        system_prompt=config.data.system_prompt,
    )
    system_option = "data.system_prompt" if config.data.system_prompt else None
    encoder.chat.check(option=MODEL_OPTION, system_option=system_option)
    end_tokens = end_token_ids(tokenizer, model_dir)
    check_vocabulary(tokenizer, end_tokens, shape.vocab_size, model_dir)
    check_layout(shape, config.parallel)
    check_routing_replay(shape, config)
    check_lengths(config, shape.max_position_embeddings)
    loaded = load_training(config.data, with_fields=config.verify.own_judge)
    problems = _usable(config, encoder, loaded)
    problems, held_out = _choose_held_out(config, problems, encoder)
    more = {
        given.name: _read_more(config, given, encoder) for given in config.eval.more
    }
    if more and held_out is None:
        raise UserError(
            "eval.more adds to the main evaluation set, but there is none; set eval.data "
            "to one of them, or eval.holdout"
        )
    main = {} if held_out is None else {"eval.data": held_out}
    others = {f"eval.more.{name}": given for name, given in more.items()}
    problems = leave_out_held_out(problems, main | others)
    problems, chosen = keep_by_pass_rate(problems, config.data)
    read = [problems, *([held_out] if held_out is not None else []), *more.values()]
    stored = _read_stored(config, shape)
    teacher: str | None = getattr(config.method, "teacher_template", None)
    evaluated = None
    if held_out is not None:
        evaluated = _evaluation(config, config.eval, end_tokens, held_out)
    return RunInput(
        model_dir=model_dir,
        encoder=encoder,
        teacher=None if teacher is None else teacher_of(encoder, teacher),
        settings=_sampling_of(config.rollout, end_tokens),
        problems=problems,
        held_out=evaluated,
        more_held_out={
            each.name: _evaluation(config, each, end_tokens, more[each.name])
            for each in config.eval.more
        },
        stored=stored,
        method=_open_method(config, problems, evaluated, encoder),
        bad_rows=tuple(row for each in read for row in each.bad_rows),
        notes=(*filter(None, [chosen]), *_notes(config, problems, held_out)),
    )


def _read_stored(config: Config, shape: ModelShape) -> StoredResponses | None:
    """Errors: `UserError` where method and data.responses do not fit, a row is too long, or the
    tokens are another model's.
    """
    check_responses(config)
    if (path := config.data.responses) is None:
        return None
    stored, max_tokens = read_stored_responses(path), shape.max_position_embeddings
    made_for = stored.manifest.get("method", {}).get("name", config.method.name)
    if made_for != config.method.name:
        raise UserError(
            f"data.responses={path} were made for method.name={made_for}, not "
            f"{config.method.name}; make others with `megatron-opsft data {config.method.name}`"
        )
    if stored.largest_id >= shape.vocab_size:
        raise UserError(
            f"data.responses={path} has token {stored.largest_id}, but the model has "
            f"{shape.vocab_size}: it was made with another model's tokenizer; make it again"
        )
    lengths = map(
        sum, zip(stored.num_prompt_tokens, stored.num_response_tokens, strict=True)
    )
    for row, length in enumerate(lengths, start=1):
        if max_tokens is not None and length > max_tokens:
            raise UserError(
                f"data.responses={path}, row {row}: {length} tokens, but the model takes "
                f"{max_tokens}; leave it out"
            )
    return stored


def _open_method(
    config: Config,
    training: ProblemSet,
    held_out: HeldOut | None,
    encoder: PromptEncoder,
) -> MethodRun:
    """Errors: `UserError` for missing lengths of the reference model, for problems that a method
    would be tuned and evaluated on, and for a system message that the model would not see.
    """
    problems = training.problems
    references: dict[str, ReferenceStatistics] = {}
    if (path := getattr(config.method, "references", None)) is not None:
        references = read_references(path)
        check_references(references, (problem.id for problem in problems), path)
    method = MethodRun(config.method, seed=config.run.seed, references=references)
    says_limit = bool(method.prompt_change(problems[0].id).system)
    if says_limit and encoder.chat.left_out(["system", "user"]):
        raise UserError(
            f"method.name={config.method.name} tells the model its limit in a system message, "
            f"which the chat template of {encoder.tokenizer.name_or_path} leaves out; let it print "
            "system messages, or set method.announce_limit=false"
        )
    if (
        held_out is not None
        and (size := config.method.monitor_size(method.state)) is not None
    ):
        monitor = shuffled_subset(problems, size[0], seed=0)
        check_monitor((p.text for p in monitor), (p.text for p in held_out.problems))
    return method


def _choose_held_out(
    config: Config, problems: ProblemSet, encoder: PromptEncoder
) -> tuple[ProblemSet, ProblemSet | None]:
    """What is trained on, and what is evaluated on."""
    if config.eval.holdout:
        if config.eval.data is not None:
            raise UserError(
                "eval.holdout and eval.data exclude each other; set one of them"
            )
        return take_held_out(problems, config.eval.holdout, config.run.seed)
    held_out = load_held_out(
        config.data, config.eval, with_fields=config.verify.own_judge
    )
    return problems, None if held_out is None else _usable(config, encoder, held_out)


def _read_more(config: Config, given: EvalSet, encoder: PromptEncoder) -> ProblemSet:
    """A set of eval.more."""
    read = load_problems(
        given.data,
        split=given.split or "test",
        **fields_of(given),
        section=f"eval.more.{given.name}.",
        template=config.data.template,
        with_fields=config.verify.own_judge,
    )
    return _usable(config, encoder, read)


def _usable(config: Config, encoder: PromptEncoder, read: ProblemSet) -> ProblemSet:
    return drop_unusable_prompts(read, encoder.encode, config.data.max_prompt_tokens)


def _evaluation(
    config: Config,
    given: EvalConfig | EvalSet,
    end_tokens: tuple[int, ...],
    read: ProblemSet,
) -> HeldOut:
    number = given.num_problems or config.eval.num_problems
    return HeldOut(
        problems=shuffled_subset(read.problems, number, seed=0),
        settings=_sampling_of(config.eval, end_tokens),
        samples_per_problem=given.samples_per_problem
        or config.eval.samples_per_problem,
    )


def _sampling_of(
    section: RolloutConfig | EvalConfig, end_tokens: tuple[int, ...]
) -> SamplingSettings:
    assert section.max_response_tokens is not None  # see `fit_lengths`
    return SamplingSettings(
        temperature=section.temperature,
        top_p=section.top_p,
        max_response_tokens=section.max_response_tokens,
        end_token_ids=end_tokens,
        seeded=isinstance(section, EvalConfig) or section.seeded,
    )


def _notes(
    config: Config, problems: ProblemSet, held_out: ProblemSet | None
) -> Iterator[str]:
    method = config.method
    defaults = {key: type(method).model_fields[key].default for key in method.per_token}
    scaled = [  # what `MethodSettings.fitted` changed, with the authors' values in brackets
        f"method.{key}={getattr(method, key):.3g} ({default})"
        for key, default in defaults.items()
        if key not in method.model_fields_set and getattr(method, key) != default
    ]
    if scaled:
        yield (
            f"{', '.join(scaled)}: scaled to rollout.max_response_tokens="
            f"{config.rollout.max_response_tokens}, too short for the authors' values in brackets"
        )
    yield from describe_data(config, problems, held_out)
    if not config.rollout.seeded:
        yield (
            "rollout.seeded=false: responses depend on the batch that they are decoded in, so a "
            "repeated or resumed run samples others"
        )
    if (temperature := config.rollout.temperature) != 1.0:
        yield (
            f"rollout.temperature={temperature}: sampling is then not on-policy; the paper saw "
            "training collapse at 0.3 and 0.6 and diverge at 1.2 and 1.5. Use 1.0."
        )
