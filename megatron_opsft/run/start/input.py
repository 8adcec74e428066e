"""What a run reads before it computes anything: model directory, tokenizer, problems."""

from collections.abc import Iterator, Mapping, Sequence
from operator import add
from pathlib import Path

from megatron_opsft.config import Config, EvalConfig, RolloutConfig
from megatron_opsft.config.run import EvalSet
from megatron_opsft.data.chatml import chatml_files
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
from megatron_opsft.records import Message, Problem, TokenIds, record
from megatron_opsft.rollout.engine import SamplingSettings
from megatron_opsft.run.start.checked_run import CheckedRun
from megatron_opsft.run.start.pass_rates import keep_by_pass_rate


@record
class HeldOut:
    """A set of held-out problems, and how responses to them are sampled."""

    problems: Sequence[Problem]
    settings: SamplingSettings
    samples_per_problem: int


@record
class RunInput:
    """What a run reads before it computes anything."""

    model_dir: Path
    model_files: Mapping[str, bytes]
    """Files of the trained model that its base model may lack, name -> content: the template of
    data.chat_template.
    """
    encoder: PromptEncoder
    teacher: PromptEncoder | None
    """The prompts of the method's teacher, if it has one."""
    settings: SamplingSettings
    """How training samples."""
    problems: ProblemSet
    held_out: HeldOut | None
    """The problems of eval.data or eval.holdout."""
    more_held_out: Mapping[str, HeldOut]
    """The problems of eval.more, by the name of the set."""
    stored: StoredResponses | None
    """The fixed data of data.responses, if the method trains on such."""
    method: MethodRun
    bad_rows: tuple[BadRow, ...]
    """The rows of training data and held-out problems that are left out."""
    notes: tuple[str, ...]
    """Warnings for the user, a line each."""

    def example(self, problem: Problem | None = None) -> tuple[list[Message], str]:
        """Return the messages and the prompt's text of a problem, by default of the first one, as
        in the next step.
        """
        problem = problem or self.problems.problems[0]
        change = self.method.prompt_change(problem.id)
        messages = self.encoder.messages(
            problem, system=change.system, suffix=change.suffix
        )
        return messages, self.encoder.chat.text(messages)


def read_input(checked: CheckedRun, model_dir: Path) -> RunInput:
    """Read tokenizer and data, and check them against the model and the configuration.

    model_dir: the directory of the model to train. Errors: `UserError` for a tokenizer or data that
    cannot be trained with.
    """
    config, shape = checked.config, checked.shape
    tokenizer = load_tokenizer(model_dir, chat_template=config.data.chat_template)
    encoder = PromptEncoder(
        tokenizer=tokenizer,
        template=config.data.template,
        system_prompt=config.data.system_prompt,
        template_arguments=config.data.template_arguments,
    )
    encoder.check(option=MODEL_OPTION, section="data.")
    end_tokens = end_token_ids(tokenizer, model_dir)
    check_vocabulary(tokenizer, end_tokens, shape.vocab_size, model_dir)
    training = load_training(config.data, with_fields=config.verify.own_judge)
    problems = _usable(config, encoder, training)
    problems, held_out_problems = _choose_held_out(config, problems, encoder)
    held_out_sets = {}
    held_out: HeldOut | None = None
    if held_out_problems is not None:
        held_out_sets["eval.data"] = held_out_problems
        held_out = _held_out_of(config, config.eval, end_tokens, held_out_problems)
    more_held_out = {}
    for eval_set in config.eval.more:
        more = _read_more(config, eval_set, encoder)
        held_out_sets[f"eval.more.{eval_set.name}"] = more
        more_held_out[eval_set.name] = _held_out_of(config, eval_set, end_tokens, more)
    if more_held_out and held_out is None:
        raise UserError(
            "eval.more adds to the main evaluation set, but there is none; set eval.data "
            "to one of them, or eval.holdout"
        )
    problems = leave_out_held_out(problems, held_out_sets)
    problems, pass_rate_note = keep_by_pass_rate(problems, config.data)
    bad_rows = list(problems.bad_rows)
    for problem_set in held_out_sets.values():
        bad_rows += problem_set.bad_rows
    stored = _read_stored(config, shape)
    template = config.method.teacher
    notes = [pass_rate_note] if pass_rate_note else []
    return RunInput(
        model_dir=model_dir,
        model_files=chatml_files(tokenizer, end_tokens, model_dir),
        encoder=encoder,
        teacher=None if template is None else teacher_of(encoder, template),
        settings=_sampling_of(config.rollout, end_tokens),
        problems=problems,
        held_out=held_out,
        more_held_out=more_held_out,
        stored=stored,
        method=_open_method(config, problems, held_out, encoder),
        bad_rows=tuple(bad_rows),
        notes=(*notes, *_notes(config, problems, held_out_problems)),
    )


def _read_stored(config: Config, shape: ModelShape) -> StoredResponses | None:
    """Read data.responses; None if the method samples.

    Errors: `UserError` if they were made for another method, a row is too long, or the tokens are
    those of another model.
    """
    path = config.data.responses
    if path is None:
        return None
    stored = read_stored_responses(path)
    max_tokens = shape.max_position_embeddings
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
    lengths = map(add, stored.num_prompt_tokens, stored.num_response_tokens)
    for row, num_tokens in enumerate(lengths, start=1):
        if num_tokens > max_tokens:
            raise UserError(
                f"data.responses={path}, row {row}: {num_tokens} tokens, but the model takes "
                f"{max_tokens}; leave it out"
            )
    return stored


def _open_method(
    config: Config,
    training: ProblemSet,
    held_out: HeldOut | None,
    encoder: PromptEncoder,
) -> MethodRun:
    """Return the method in its first state.

    Errors: `UserError` for missing lengths of the reference model, for problems that the method
    would both be tuned and evaluated on, and for a system message that the chat template drops.
    """
    problems = training.problems
    references: dict[str, ReferenceStatistics] = {}
    path = config.method.reference_file
    if path is not None:
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
    monitor_size = method.monitor_size
    if held_out is not None and monitor_size is not None:
        num_problems, _ = monitor_size
        monitor = shuffled_subset(problems, num_problems, seed=0)
        check_monitor((p.text for p in monitor), (p.text for p in held_out.problems))
    return method


def _choose_held_out(
    config: Config, problems: ProblemSet, encoder: PromptEncoder
) -> tuple[ProblemSet, ProblemSet | None]:
    """Return the problems to train on, and those to evaluate on, if any."""
    if config.eval.holdout:
        if config.eval.data is not None:
            raise UserError(
                "eval.holdout and eval.data exclude each other; set one of them"
            )
        return take_held_out(problems, config.eval.holdout, config.run.seed)
    held_out = load_held_out(
        config.data, config.eval, with_fields=config.verify.own_judge
    )
    if held_out is None:
        return problems, None
    return problems, _usable(config, encoder, held_out)


def _read_more(config: Config, eval_set: EvalSet, encoder: PromptEncoder) -> ProblemSet:
    """Read a set of eval.more."""
    problems = load_problems(
        eval_set.data,
        split=eval_set.split or "test",
        **fields_of(eval_set),
        section=f"eval.more.{eval_set.name}.",
        template=config.data.template,
        with_fields=config.verify.own_judge,
    )
    return _usable(config, encoder, problems)


def _usable(config: Config, encoder: PromptEncoder, problems: ProblemSet) -> ProblemSet:
    return drop_unusable_prompts(
        problems, encoder.encode, config.data.max_prompt_tokens
    )


def _held_out_of(
    config: Config,
    eval_set: EvalConfig | EvalSet,
    end_tokens: TokenIds,
    problems: ProblemSet,
) -> HeldOut:
    """Choose the problems that are evaluated on; a set takes what it leaves open from eval."""
    num_problems = eval_set.num_problems or config.eval.num_problems
    return HeldOut(
        problems=shuffled_subset(problems.problems, num_problems, seed=0),
        settings=_sampling_of(config.eval, end_tokens),
        samples_per_problem=eval_set.samples_per_problem
        or config.eval.samples_per_problem,
    )


def _sampling_of(
    section: RolloutConfig | EvalConfig, end_tokens: TokenIds
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
    """Warn of what is unusual in the configuration and in the data, a line each."""
    method = config.method
    scaled = []
    for key in method.per_token:
        value = getattr(method, key)
        default = type(method).model_fields[key].default
        # `MethodSettings.fitted` changes values of the authors that the user left alone.
        if key not in method.model_fields_set and value != default:
            scaled.append(f"method.{key}={value:.3g} ({default})")
    if scaled:
        yield (
            f"{', '.join(scaled)}: scaled to rollout.max_response_tokens="
            f"{config.rollout.max_response_tokens}, too short for the authors' values in brackets"
        )
    num_taken = 0
    if config.eval.holdout and held_out is not None:
        num_taken = len(held_out.problems)
    yield from describe_data(
        config.data, config.run.steps, problems, held_out, num_taken=num_taken
    )
    if not config.rollout.seeded:
        yield (
            "rollout.seeded=false: responses depend on the batch that they are decoded in, so a "
            "repeated or resumed run samples others"
        )
    temperature = config.rollout.temperature
    if temperature != 1.0:
        yield (
            f"rollout.temperature={temperature}: sampling is then not on-policy; the paper saw "
            "training collapse at 0.3 and 0.6 and diverge at 1.2 and 1.5. Use 1.0."
        )
