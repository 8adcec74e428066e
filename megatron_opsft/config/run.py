"""Sections of a run: its data, judge, length, evaluations and checkpoints."""

import re
from collections import Counter
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    field_validator,
    model_validator,
)

from megatron_opsft.errors import UserError, plural
from megatron_opsft.section import (
    ADJUSTABLE,
    BY_CONTENT,
    FREE,
    MATH,
    ChatTemplateName,
    Expanded,
    JudgeName,
    MixturePart,
    Section,
    Sources,
    TemplateArguments,
    TemplateName,
)


class DataConfig(Section):
    train: Annotated[Sources, BY_CONTENT]
    """`arithmetic` (embedded), a file, a Hugging Face data set, or a mixture of them, a list of
    {path, weight} (docs/data.md).
    """
    split: str = "train"
    """Split of a Hugging Face data set."""
    subset: str | None = None
    """Configuration name of a Hugging Face data set, such as `main` of gsm8k."""
    problem_field: str | None = None
    """Field of the problem; by default problem, question, prompt or messages (docs/data.md)."""
    answer_field: str | None = None
    """Field of the gold answer; by default answer, final_answer or solution (docs/data.md)."""
    pass_rate: tuple[float, float] | None = None
    """[low, high]: train on problems of which this share of the samples in data.pass_rate_from is
    right.
    """
    pass_rate_from: Annotated[Path | None, Expanded, BY_CONTENT] = None
    """The --out of an evaluation of the training problems (docs/data.md)."""
    responses: Annotated[Path | None, Expanded, BY_CONTENT] = None
    """Fixed data, written by the command `data`; B x G responses a step."""
    prompts_per_step: Annotated[int, ADJUSTABLE] = Field(64, ge=1, lt=2**31)
    """B: problems drawn in each step."""
    max_prompt_tokens: Annotated[int, ADJUSTABLE] = Field(1024, ge=1)
    """Problems with a longer prompt are left out. The default shrinks if the model has
    no room for it beside the longest response.
    """
    template: TemplateName = "r1"
    """What is asked beside the problem: r1, cod, concise, chat, or a .jinja file (docs/data.md)."""
    system_prompt: str = ""
    """System message before each problem; rows that have one keep theirs."""
    chat_template: ChatTemplateName | None = None
    """chatml: ChatML, for a base model without a chat template (docs/data.md)."""
    template_arguments: TemplateArguments = None
    """Values for the model's chat template, such as {enable_thinking: false} (docs/data.md)."""

    @model_validator(mode="after")
    def _check_pass_rate(self) -> Self:
        """Errors: `UserError` if one of the two keys is missing, or the rates are no interval."""
        if (self.pass_rate is None) != (self.pass_rate_from is None):
            missing = "pass_rate" if self.pass_rate is None else "pass_rate_from"
            raise UserError(
                f"data.{missing} is missing: pass_rate and pass_rate_from go together"
            )
        if self.pass_rate is not None:
            low, high = self.pass_rate
            if not 0 <= low <= high <= 1:
                raise UserError(
                    f"data.pass_rate={[low, high]} must be [low, high], shares from 0 to 1"
                )
        return self

    @property
    def sources(self) -> tuple[MixturePart, ...]:
        """The sources of `train`; what a source does not set is as in this section."""
        sources = self.train
        if isinstance(sources, str):
            sources = (MixturePart(path=sources),)
        keys = ("split", "subset", "problem_field", "answer_field")
        completed = []
        for source in sources:
            values = {key: getattr(source, key) or getattr(self, key) for key in keys}
            completed.append(source.model_copy(update=values))
        return tuple(completed)

    @property
    def name(self) -> str:
        """Name of `train` in messages."""
        return " + ".join(source.path for source in self.sources)


class VerifyConfig(Section):
    judge: JudgeName = "math"
    """Who judges an answer: math, or your own, package.module:function or FILE.py:function
    (docs/data.md).
    """
    workers: Annotated[int, FREE] = Field(0, ge=0)
    """Most verifier processes of a rank; 0: its share of the CPU cores."""
    timeout_seconds: Annotated[float, ADJUSTABLE] = Field(10.0, gt=0, le=1e6)
    """Wall-clock limit for one answer."""
    memory_gb: Annotated[float, ADJUSTABLE] = Field(1.0, gt=0, le=2**20)
    """Address space of a verifier process in GiB; an answer that needs more counts as an error."""

    @property
    def own_judge(self) -> bool:
        """True if `judge` is a function of the user's, which takes all columns of a row."""
        return self.judge != MATH


class RunConfig(Section):
    dir: Annotated[Path, Expanded, FREE] = Path("runs/default")
    """Everything that the run writes is below this directory."""
    steps: Annotated[int, FREE] = Field(300, ge=0)
    """Training steps: one rollout batch and one update each."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the problem order and of every response."""
    eval_every: Annotated[int, FREE] = Field(0, ge=0)
    """Steps between evaluations; 0: before the first step and after the last."""
    device: Annotated[Literal["auto", "cpu", "cuda"], ADJUSTABLE] = "auto"
    """auto: cuda where there is one."""
    show_samples: Annotated[int, FREE] = Field(1, ge=0)
    """Responses of an evaluation to show on the console."""
    save_rollouts: Annotated[bool, FREE] = True
    """Keep every response of every step in rollouts/, and of every evaluation in held_out/."""
    save_logprobs: Annotated[bool, FREE] = False
    """Keep the log-probability of each sampled token, too, which costs a pass of the trainer."""
    tensorboard: Annotated[bool, FREE] = True
    """Write TensorBoard events."""
    wandb: Annotated[Literal["off", "offline", "online"], FREE] = "off"
    """Weights & Biases; needs `pip install wandb`."""
    wandb_project: Annotated[str, FREE] = "megatron-opsft"
    """Project name at Weights & Biases."""
    max_minutes: Annotated[float, FREE] = Field(0, ge=0)
    """Then the run writes a checkpoint and exits with 75; 0: no limit."""
    hang_minutes: Annotated[float, FREE] = Field(60, ge=0, le=1e6)
    """A rank that stays in one phase for longer ends the run with exit code 69; set it above the
    longest phase; 0: no limit.
    """
    silence_seconds: Annotated[float, FREE] = Field(60, gt=0, le=1e6)
    """A rank that gives no sign of life for longer ends the run too."""
    deterministic: bool = False
    """Bit-identical repetition on GPUs, at lower speed (docs/gpu.md); CPUs always have it."""

    @property
    def collective_minutes(self) -> float:
        """Time-out of collectives, in minutes. The watchdog ends a run earlier, since a time-out
        does not tell for which rank it waited.
        """
        one_week = 7 * 24 * 60
        return self.hang_minutes + 1 if self.hang_minutes else one_week


class CheckpointConfig(Section):
    every: NonNegativeInt = 50
    """Steps between checkpoints; 0: only at the end and on SIGTERM."""
    keep: int = Field(2, ge=1)
    """How many of the newest checkpoints to keep."""
    asynchronous: bool = True
    """Write in the background, from a copy in CPU memory."""


class EvalSet(Section):
    """One more set of held-out problems. Keys that are None have the value of `eval`."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_]+$")]
    data: Annotated[str, Expanded]
    split: str | None = None
    subset: str | None = None
    problem_field: str | None = None
    answer_field: str | None = None
    num_problems: int | None = Field(None, ge=1)
    samples_per_problem: int | None = Field(None, ge=1)


def _list_sets(value: object) -> object:
    """Turn a mapping into a list of sets. `NAME: SOURCE` is short for `NAME: {data: SOURCE}`."""
    if not isinstance(value, dict):
        return value
    sets = []
    for name, keys in value.items():
        if not isinstance(keys, dict):
            keys = {"data": keys}
        sets.append({"name": name, **keys})
    return sets


class EvalConfig(Section):
    data: Annotated[str | None, Expanded, BY_CONTENT] = None
    """Held-out problems, such as the test split of data.train; of `arithmetic` by default its own.
    """
    split: str | None = None
    """Split of a Hugging Face data set; by default its `test`."""
    subset: str | None = None
    """Configuration name of a Hugging Face data set; of data.train by default data.subset."""
    problem_field: str | None = None
    """Field of the problem; of data.train by default data.problem_field."""
    answer_field: str | None = None
    """Field of the gold answer; of data.train by default data.answer_field."""
    holdout: NonNegativeInt = 0
    """Problems to take out of data.train and evaluate on; not with eval.data."""
    num_problems: int = Field(256, ge=1)
    """How many of them, the first ones of a fixed shuffle."""
    samples_per_problem: int = Field(2, ge=1)
    """N: responses to each."""
    temperature: NonNegativeFloat = 0.6
    """Temperature in evaluation; 0: greedy, with eval.samples_per_problem=1."""
    top_p: float = Field(0.95, gt=0, le=1)
    """Nucleus sampling in evaluation."""
    max_response_tokens: Annotated[int | None, ADJUSTABLE] = Field(None, ge=1)
    """Longest response in evaluation; by default what the model's positions allow, at most 4,096
    (hf) or 32,768 (vllm), at least rollout.max_response_tokens.
    """
    more: Annotated[tuple[EvalSet, ...], BeforeValidator(_list_sets), BY_CONTENT] = ()
    """More sets to evaluate: NAME to a source, or to {data, split, subset, problem_field,
    answer_field, num_problems, samples_per_problem}.
    """
    best: Literal["shortest", "accuracy"] = "shortest"
    """The best evaluation: the shortest, within eval.best_within; or that of the highest accuracy.
    """
    best_within: float = Field(0.01, ge=0, le=1)
    """How far below the base model's the accuracy of the shortest may be."""
    export_best: Annotated[bool, FREE] = False
    """Keep the best evaluation's model in best/, if it beats the base model."""
    stop_when_worse: Annotated[int, FREE] = Field(0, ge=0)
    """Evaluations in a row that are less accurate than the base model's by more than chance, after
    which the run ends with its best model; 0: none do.
    """

    @property
    def best_rule(self) -> str:
        """What the best evaluation is, in words."""
        if self.best == "accuracy":
            return "the highest accuracy"
        points = 100 * self.best_within
        return (
            f"the fewest tokens with an accuracy at most {points:g} {plural('point', points)} "
            "below the base model's"
        )

    @property
    def keeps_best(self) -> bool:
        """True if the run keeps the best evaluation's model in best/."""
        return self.export_best or self.stop_when_worse > 0

    @model_validator(mode="after")
    def _check_sets(self) -> Self:
        """Errors: `UserError` if two sets have the same name, and so the same results, or if greedy
        decoding would write the same response several times.
        """
        for name, count in Counter(more_set.name for more_set in self.more).items():
            if count > 1:
                raise UserError(f"eval.more has {count} sets named {name}; rename one")
        samples = [self.samples_per_problem]
        samples += [more_set.samples_per_problem or 1 for more_set in self.more]
        if self.temperature == 0 and max(samples) > 1:
            raise UserError(
                "eval.temperature=0: all responses to a problem are the same; set "
                "eval.samples_per_problem=1"
            )
        return self


# Two names of letters, digits, - _ and ., as the hub takes them.
_HUB_NAME = re.compile(r"\w(?:[\w.-]*\w)?/\w(?:[\w.-]*\w)?", re.ASCII)


class ExportConfig(Section):
    push_to_hub: str | None = None
    """Upload hf/ at the end to this repository of the Hugging Face hub, user/name, with the token
    of HF_TOKEN or `hf auth login`.
    """
    private: bool = True
    """Make that repository private, and upload to none that is public."""

    @field_validator("push_to_hub")
    @classmethod
    def _check_name(cls, name: str | None) -> str | None:
        """Errors: `ValueError` for a name that the hub does not take."""
        if name is None:
            return None
        is_name = _HUB_NAME.fullmatch(name) and len(name) <= 96
        if not is_name or "--" in name or ".." in name or name.endswith(".git"):
            raise ValueError(
                f"{name!r} is no repository of the hub; write user/name in letters, digits, "
                "-, _ and ."
            )
        return name
