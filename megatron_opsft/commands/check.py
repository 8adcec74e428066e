"""`train --check`: what a run would do, said before anything is computed or written."""

from collections.abc import Iterator

from megatron_opsft.commands.plan.assumptions import load_hardware, make_workload
from megatron_opsft.commands.plan.job import PlannedRun, check_planned_run
from megatron_opsft.commands.plan.least_offload import make_plan
from megatron_opsft.commands.plan.show import cost_line
from megatron_opsft.config import Config, VerifyConfig
from megatron_opsft.config.load import adjustable_keys
from megatron_opsft.config.training import describe_lora
from megatron_opsft.models.storage.model_paths import local_model
from megatron_opsft.models.storage.stored_weights import open_adapter
from megatron_opsft.records import Outcome, Problem
from megatron_opsft.run.start.check import check_run
from megatron_opsft.run.start.checked_run import CheckedRun
from megatron_opsft.run.start.disk import check_disk, describe_bytes, disk_use
from megatron_opsft.run.start.input import read_input
from megatron_opsft.run.start.run_directory import RunDir
from megatron_opsft.runtime.formatting import count_of
from megatron_opsft.runtime.launched import launched_ranks
from megatron_opsft.runtime.libraries import sees_gpu
from megatron_opsft.verify.verifier import judge_gold


def describe_start(
    config: Config, *, resume: bool, must_exist: bool, overwrite: bool
) -> str:
    """Check a run as `train` does, and say what it would do: one line for each fact.

    must_exist: refuse to resume a run that is not there. Errors: `UserError`, as of `train`.
    """
    checked = check_run(
        config,
        resume=resume,
        overwrite=overwrite,
        must_exist=must_exist,
        world_size=launched_ranks(),
    )
    rows = [
        ("model", _describe_model(checked)),
        *_describe_data(checked),
        ("method", _describe_method(checked)),
        ("memory", _describe_fit(checked)),
        ("disk", _describe_disk(checked, resume=resume)),
        *_describe_resume(checked),
    ]
    width = max(len(name) for name, _ in rows)
    lines = []
    for name, text in rows:
        indented = text.replace("\n", "\n" + " " * (width + 2))
        lines.append(f"{name.ljust(width)}  {indented}")
    return "\n".join(lines)


def _describe_model(checked: CheckedRun) -> str:
    config, shape = checked.config, checked.shape
    text = (
        f"{config.model.path}: {shape.architecture}, {shape.num_layers} layers, "
        f"hidden size {shape.hidden_size}, {shape.vocab_size:,} tokens, trained in "
        f"{config.model.dtype}"
    )
    if config.lora.rank:
        text += f", {describe_lora(config.lora)}"
    if config.model.adapter is not None:
        open_adapter(config.model, config.lora, shape)  # its files must fit
        text += f" from {config.model.adapter}"
    return text


def _describe_data(checked: CheckedRun) -> Iterator[tuple[str, str]]:
    """Yield what the problems are, the first prompt with its gold answer, and if the judge takes
    that; they need the model's tokenizer.
    """
    path = checked.config.model.path
    model_dir = local_model(path)
    if model_dir is None:
        fetch = f"bring its tokenizer here with `megatron-opsft fetch CONFIG`: {path}"
        yield "data", f"not read, since the model is not on this machine; {fetch}"
        return
    run_input = read_input(checked, model_dir)
    problems = run_input.problems
    num_problems = count_of([len(problems.problems)], "problem")
    text = f"{problems.name}: {num_problems} to train on"
    if run_input.held_out is not None:
        text += f", {len(run_input.held_out.problems):,} held out"
    text += f", {count_of([len(run_input.bad_rows)], 'row')} left out"
    if num_repeats := sum(row.is_repeat for row in run_input.bad_rows):
        verb = "row repeats" if num_repeats == 1 else "rows repeat"
        text += f" ({num_repeats:,} {verb} another problem)"
    yield "data", text
    for note in run_input.notes:
        yield "note", note
    _, prompt = run_input.example()
    yield "prompt", prompt
    yield "gold answer", problems.problems[0].answer
    yield "judge", _describe_judge(checked.config.verify, problems.problems[0])


def _describe_judge(config: VerifyConfig, problem: Problem) -> str:
    """Say if the judge takes a problem's own answer. Errors: those of `judge_gold`."""
    verdict = judge_gold(config, problem)
    answer = "yes"
    if verdict.outcome is not Outcome.CORRECT:
        answer = f"no ({verdict.outcome.replace('_', ' ')})"
    return f"{config.judge} takes the first problem's own answer as right: {answer}"


def _describe_method(checked: CheckedRun) -> str:
    config = checked.config
    lengths = ""
    if config.method.length_of == "thinking":
        lengths = ", lengths of the thinking"
    return (
        f"{config.method.name}: {config.method.formula}{lengths}; "
        f"{count_of([config.run.steps], 'step')} of "
        f"{count_of([config.responses_per_step], 'response')} of up to "
        f"{config.rollout.max_response_tokens} tokens"
    )


def _describe_fit(checked: CheckedRun) -> str:
    """Say what `plan` says of this number of ranks, on a CPU or on H100 GPUs."""
    config = checked.config
    on_gpu = config.run.device == "cuda"
    if config.run.device == "auto":
        on_gpu = sees_gpu()
    device = "h100" if on_gpu else "cpu"
    hardware = load_hardware(device, None, gpus_per_node=min(checked.world_size, 8))
    run = PlannedRun(
        config=config,
        shape=checked.shape,
        hardware=hardware,
        world_size=checked.world_size,
        workload=make_workload(config),
    )
    check_planned_run(run)
    verdict = cost_line(make_plan(run, max(config.run.steps, 1)))
    return f"{checked.world_size} x {hardware.name}: {verdict}"


def _describe_disk(checked: CheckedRun, *, resume: bool) -> str:
    use = disk_use(checked.config, checked.shape)
    warning = check_disk(checked.config, checked.shape, resume=resume)
    text = (
        f"{checked.config.run.dir}: checkpoints up to {describe_bytes(use.checkpoints)}, models "
        f"{describe_bytes(use.models)}, rollouts up to {describe_bytes(use.rollouts)}, responses "
        f"to held-out problems up to {describe_bytes(use.held_out)}"
    )
    return f"{text}; {warning}" if warning else text


def _describe_resume(checked: CheckedRun) -> Iterator[tuple[str, str]]:
    """Yield if there is a run; then also which keys that change numbers may differ on resume."""
    has_run = bool(RunDir(checked.config.run.dir).entries())
    yield "run.dir", f"{checked.config.run.dir} {'has a run' if has_run else 'is new'}"
    if has_run:
        keys = ", ".join(adjustable_keys(checked.config))
        yield "on resume", f"{keys}, and what changes no number, may differ"
