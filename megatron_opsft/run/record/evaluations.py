"""Evaluates a run when it is due, and keeps its best models."""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

from megatron_opsft.callback import Callback
from megatron_opsft.errors import UserError
from megatron_opsft.methods.facts import describe_rollouts, describe_token_use
from megatron_opsft.records import JsonObject, Message, Response
from megatron_opsft.rollout.sampling import EVAL_STEP
from megatron_opsft.run.record.advice import (
    advise_on_base,
    cuts_off_more,
    explain_cut_off,
    measure_correct,
)
from megatron_opsft.run.record.metrics import MetricsLog, describe_sample
from megatron_opsft.run.record.rollout_log import RolloutLog
from megatron_opsft.run.record.summary import card_of_best
from megatron_opsft.run.record.written_models import (
    drop_superseded,
    has_best,
    write_best,
)
from megatron_opsft.run.run_files import REASONS, best_evaluation
from megatron_opsft.run.start.input import HeldOut
from megatron_opsft.run.start.session import Session, log
from megatron_opsft.run.step.judged_problems import JudgedProblems, judge_rollouts
from megatron_opsft.runtime.console import say
from megatron_opsft.runtime.distributed import gather_from_all
from megatron_opsft.runtime.formatting import count_of
from megatron_opsft.runtime.phase import (
    Interrupted,
    StopSignal,
    announce,
    enter_phase,
    interruptible,
)


@dataclass(eq=False)
class Evaluations:
    """Evaluates on the held-out problems. Every rank calls every method."""

    session: Session
    metrics_log: MetricsLog | None
    """Rank 0's; None on other ranks, which write nothing."""
    rollouts: RolloutLog
    callbacks: Sequence[Callback]
    """Called on rank 0."""
    lines: list[JsonObject]
    """The lines of evals.jsonl, on every rank."""
    warned: set[tuple[str, bool]] = field(default_factory=set)
    """Prefix of a held-out set, and whether training was the cause: what `_warn_of_cut_off` said.
    """

    def run_if_due(self, step: int, stop: StopSignal) -> bool:
        """Evaluate if it is due after `step` updates, unless a resumed run finds it done.

        It is due before the first step, every `run.eval_every` steps, and after the last step.
        Returns True on every rank if a signal interrupted it: the run then writes its checkpoint,
        and the resumed run makes the evaluation.
        """
        s = self.session
        run = s.config.run
        is_due = step in (0, run.steps) or (
            run.eval_every and step % run.eval_every == 0
        )
        if not is_due or s.held_out is None:
            return False
        is_done = any(line["step"] == step for line in self.lines)
        if not is_done:
            # Ranks that share an engine could not leave it at the same time.
            may_leave = s.sampler.engine.share.count == s.layout.world_size
            leaving = interruptible(lambda: stop.signalled)
            try:
                with leaving if may_leave else nullcontext():
                    self.evaluate(step)
            except Interrupted:
                return True
        if step and s.config.eval.keeps_best and self._best_step() == step:
            write_best(s, step, self._card_of_best())
        drop_superseded(s, step)
        return False

    def evaluate(self, step: int) -> None:
        """Measure held-out accuracy and length after `step` updates; write the responses, and then
        the line of evals.jsonl.
        """
        s = self.session
        assert s.held_out is not None
        enter_phase("evaluate")
        line: JsonObject = {"step": step}
        begin = time.monotonic()
        judged = _judge(s, "", s.held_out)
        self.rollouts.write_held_out(step, judged)
        line |= _measure(judged.responses, s.held_out, "eval")
        line |= measure_correct([r.num_tokens for r in judged.responses if r.correct])
        examples = _examples(s, judged)
        del judged  # so that only one set's responses are kept at a time
        for name, held_out in s.more_held_out.items():
            judged = _judge(s, f" of {name}", held_out)
            self.rollouts.write_held_out(step, judged, name)
            line |= _measure(judged.responses, held_out, f"eval_{name}")
            del judged
        line["eval_seconds"] = time.monotonic() - begin
        self.lines.append(line)
        if self.metrics_log is None:
            return
        self.metrics_log.write_evaluation(line, s.more_held_out)
        self._warn_of_cut_off(line)
        for example in examples:
            say(example, dim=True)
        advice = "" if step else advise_on_base(line)
        if advice:
            if s.config.data.template != "chat":
                advice += "; a small instruct model may need data.template=chat"
            log.warning(advice)
        for callback in self.callbacks:
            callback.on_evaluation(dict(line))

    def _warn_of_cut_off(self, line: JsonObject) -> None:
        """Warn of each held-out set whose values the limit distorts: once, and once more when
        training has become the cause.
        """
        base = self.lines[0]
        names = {"eval": "held-out"}
        names |= {f"eval_{name}": name for name in self.session.more_held_out}
        for key, name in names.items():
            explanation = explain_cut_off(base, line, key, self.session.config)
            cause = key, cuts_off_more(base, line, key)
            if explanation and cause not in self.warned:
                self.warned.add(cause)
                log.warning("%s: %s", name, explanation)

    def step_of_best_model(self) -> int:
        """Return the step of the best evaluation if best/ has its model, else 0."""
        step = self._best_step()
        return step if has_best(self.session, step) else 0

    def _card_of_best(self) -> str:
        """Return the card of the model that was evaluated last, the best one; "" on ranks other
        than 0.
        """
        s = self.session
        if not s.layout.is_main:
            return ""
        return card_of_best(self.lines, s.config, *self.example())

    def example(self) -> tuple[list[Message], str]:
        """Return messages and prompt of a problem for a card: the first of the first step, as a run
        may end before it draws the first one of its data.
        """
        s = self.session
        return s.example(s.problems_of_draw(0)[0])

    def _best_step(self) -> int:
        """Return the step of the best evaluation; 0 if there is none."""
        best = best_evaluation(self.lines, self.session.config.eval)
        return best.get("step", 0)


def _judge(s: Session, title: str, held_out: HeldOut) -> JudgedProblems:
    """Sample responses to held-out problems, with the same seeds every time, and judge them.

    title: the end of a sentence that names the set, for the log. Errors: `UserError` if it has no
    problem.
    """
    problems = held_out.problems
    announce(f"evaluating on {count_of([len(problems)], 'held-out problem')}{title}")
    rollouts = s.sampler.sample(
        problems,
        held_out.settings,
        num_samples=held_out.samples_per_problem,
        step=EVAL_STEP,
        encode=partial(s.prompt_of, held_out=True),
    )
    judged = judge_rollouts(s, problems, rollouts)
    if not judged.responses:
        raise UserError("eval.data: there is no held-out problem to evaluate on")
    return judged


def _examples(s: Session, judged: JudgedProblems) -> list[str]:
    """Describe the first response to each of the first `run.show_samples` problems."""
    numbered = []
    for response in judged.responses:
        number, index = response.problem_index, response.rollout_index
        is_shown = number < s.config.run.show_samples
        is_here = response.rank == s.layout.rank
        if is_shown and is_here and response.sample_index == 0:
            text = describe_sample(
                judged.problems[number],
                judged.rollouts[index],
                judged.verdicts[index],
            )
            numbered.append((number, text))
    return [text for _, text in sorted(gather_from_all(numbered))]


def _measure(
    responses: Sequence[Response], held_out: HeldOut, key: str
) -> dict[str, float | int]:
    """Return the values of evals.jsonl for a set: the share of correct responses, the mean number
    of their tokens, the share that the limit cut off, their number, and how many were rejected for
    each of `REASONS`.

    key: the prefix of their keys.
    """
    num_samples = len(responses)
    num_tokens = sum(response.num_tokens for response in responses)
    num_correct = sum(response.correct for response in responses)
    num_finished = sum(response.finished for response in responses)
    counts = describe_rollouts(responses, held_out.settings.max_response_tokens)
    return {
        f"{key}_accuracy": num_correct / num_samples,
        f"{key}_mean_response_tokens": num_tokens / num_samples,
        f"{key}_truncated_share": (num_samples - num_finished) / num_samples,
        f"{key}_samples": num_samples,
        **{f"{key}_{reason}": counts[reason] for reason in REASONS},
        **{
            f"{key}_{name}": value
            for name, value in describe_token_use(responses).items()
        },
    }
