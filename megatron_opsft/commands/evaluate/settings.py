"""Settings of an evaluation, and the directory that it writes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    model_validator,
)

from megatron_opsft.config import VerifyConfig
from megatron_opsft.config.load import load
from megatron_opsft.config.run_prompt import settings_of_run
from megatron_opsft.data.prompt_file import open_prompt_file
from megatron_opsft.data.sources import check_source
from megatron_opsft.data.stored_samples import PROBLEMS
from megatron_opsft.errors import UserError
from megatron_opsft.models.storage.model_paths import local_model
from megatron_opsft.rollout.limits import check_engine_settings, check_installed
from megatron_opsft.runtime.owned_directory import (
    NOT_SET,
    OTHER_JUDGE,
    OTHER_PROBLEMS,
    OTHER_TOKENIZER,
    OTHER_WEIGHTS,
    OwnedDirectory,
    describe_change,
)
from megatron_opsft.section import (
    ChatTemplateName,
    CommaSeparated,
    Expanded,
    JudgeName,
    NamedFiles,
    Section,
    TemplateArguments,
    TemplateName,
)
from megatron_opsft.verify.handed_judge import make_handed_judge_importable
from megatron_opsft.verify.verifier import JudgeKeys, check_judge

JUDGE_KEYS = JudgeKeys(timeout="verify_timeout", memory="verify_memory_gb")


class DeerSettings(Section):
    """Settings of early exit. Defaults: the paper's threshold, the released code's words, texts and
    limits.
    """

    threshold: float = Field(0.95, ge=0, le=1)
    """Exit where the trial answer's confidence is above this."""
    transition_words: Annotated[tuple[str, ...], CommaSeparated] = Field(
        ("Wait",), min_length=1
    )
    """Words at which an answer is tried; each must be one token of the model."""
    trial_prompt: str = "\n**Final Answer**\n\\boxed"
    """Inducer of the trial answer; it ends with an open box."""
    max_trial_tokens: int = Field(20, ge=1)
    """Longest trial answer; one that is longer is not confident."""
    max_trials: int = Field(10, ge=1)
    """Trials per response; then it thinks to its end."""
    think_end: str = "</think>"
    """The token that ends the model's thinking."""
    exit_text: str = "\n</think>\n\n"
    """Written on an exit, before the conclusion; counts as part of the response."""


class EvalSettings(Section):
    """Settings of one evaluation: its model, what is asked, how it is sampled, where it runs."""

    model: str
    """Hugging Face directory or hub name, run directory, checkpoint of a run, converted checkpoint,
    or tiny_reasoner.
    """
    name: str | None = None
    """Label of the model; by default its last folder."""
    baseline: str | None = None
    """Model that CR and differences refer to, evaluated alike; or the directory of an earlier
    evaluation.
    """
    benchmarks: Annotated[tuple[str, ...], CommaSeparated] = ()
    """gsm8k, math500, amc23, aime24, aime25, arithmetic, or names given in data; by default the
    paper's five, arithmetic for the tiny reasoner.
    """
    data: NamedFiles = {}
    """Benchmark -> file, as data.train of a run takes it, instead of the hub's."""
    problem_field: str | None = None
    """Field of the problem in the files of data; found if its name is a common one."""
    answer_field: str | None = None
    """Field of the answer, likewise; either may be dotted."""
    out: Annotated[Path, Expanded]
    """Directory to write; the same command continues in it."""
    engine: str = "hf"
    """hf: transformers; vllm: vLLM."""
    method: Literal["sample", "deer"] = "sample"
    """sample: plain sampling; deer: dynamic early exit."""
    deer: DeerSettings = DeerSettings()
    template: TemplateName = "r1"
    """r1: step by step; cod: Chain of Draft; concise: key steps alone; chat: the problem alone; or
    the path of a .jinja file, as in a run.
    """
    system_prompt: str = ""
    """System message before each problem."""
    chat_template: ChatTemplateName | None = None
    """chatml: ChatML, for a base model without a chat template, as in a run."""
    template_arguments: TemplateArguments = None
    """What the chat template is given, such as {enable_thinking: false}, as in a run."""
    temperature: NonNegativeFloat = 0.6
    """Sampling temperature; 0: greedy, one sample of each problem."""
    top_p: float = Field(0.95, gt=0, le=1)
    """Nucleus sampling."""
    max_tokens: int | None = Field(None, ge=1)
    """Longest response, end token included; by default 32,768, or what the model's positions allow.
    """
    samples: int | None = Field(None, ge=1, le=4096)
    """N; by default 16 or 64 by benchmark, as in the paper."""
    limit: int | None = Field(None, ge=1)
    """How many problems of each benchmark to take, from its start."""
    seed: NonNegativeInt = 0
    """Seed of the responses."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on a GPU, float32 on a CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one."""
    batch_size: int | None = Field(None, ge=1)
    """Responses decoded at once; by default 64 (hf) or 256 (vllm)."""
    tp: int = Field(1, ge=1)
    """Ranks that share one vLLM engine."""
    gpu_memory_fraction: float = Field(0.9, gt=0, lt=1)
    """Share of a GPU that vLLM fills with weights and KV cache."""
    budgets: Annotated[tuple[int, ...], CommaSeparated] = ()
    """Token budgets of the curves; by default powers of two up to max_tokens."""
    judge: JudgeName = "math"
    """Who judges an answer: math, or your own, package.module:function or FILE.py:function
    (docs/data.md).
    """
    verify_timeout: PositiveFloat = 30.0
    """Seconds for the verdict of a response."""
    verify_memory_gb: float = Field(1.0, gt=0, le=2**20)
    """Address space of a verifier process in GiB, with what a judge of your own imports."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        """Check settings against each other.

        Errors: `UserError` for settings that early exit excludes, and for several greedy samples.
        """
        if self.method == "deer":
            if self.tp != 1:
                raise UserError(
                    f"method=deer: engines of one rank only, not tp={self.tp}; leave tp out"
                )
            if self.budgets:
                raise UserError(
                    "budgets: early exit tries answers by the room left, so its samples do not "
                    "tell what a smaller limit gives; leave budgets out, or evaluate with a "
                    "smaller max_tokens"
                )
        if self.temperature == 0 and (self.samples or 1) > 1:
            raise UserError(
                f"samples={self.samples} with temperature=0: all samples of a problem are the "
                "same; leave samples out, or set temperature above 0"
            )
        return self

    @property
    def earlier_baseline(self) -> Path | None:
        """The directory of the baseline if that is an earlier evaluation."""
        if self.baseline is None:
            return None
        directory = Path(self.baseline).expanduser()
        return directory if (directory / "results.json").is_file() else None

    @property
    def verify(self) -> VerifyConfig:
        """The settings of the verifier, as a run has them."""
        return VerifyConfig(
            judge=self.judge,
            timeout_seconds=self.verify_timeout,
            memory_gb=self.verify_memory_gb,
        )


# Part of an evaluation's identity -> what it is a hash of; {} stands for its place.
_WORDS = {
    "data": OTHER_PROBLEMS,
    "model_sha256": OTHER_WEIGHTS,
    "tokenizer_sha256": OTHER_TOKENIZER,
    "verifier": OTHER_JUDGE,
}


class EvaluationDirectory(OwnedDirectory):
    """The directory of an evaluation."""

    kind = "evaluation"
    names = ("samples", PROBLEMS, "results.json", "table.md", "report.html")

    def begin(
        self,
        manifest: Mapping[str, Any],
        *,
        overwrite: bool,
        needed: Sequence[Path] = (),
    ) -> None:
        """Prepare the directory for samples of the manifest's `identity`.

        manifest: JSON; identity.data in it maps each benchmark to the hash of its problems.
        Benchmarks that this command leaves out stay in the written manifest, as do their samples.
        needed: as of `clear`. Errors: `UserError` naming the setting with which other samples in
        the directory were made.
        """
        self.check()
        if overwrite:
            self.clear(needed)
        identity = manifest["identity"]
        now = manifest.get("settings", {})

        def explain(name: str) -> str:
            before = (self.read_manifest() or {}).get("settings", {})
            return _describe_change(name, now, before)

        if self.path / "samples" in self.entries():
            self.check_same(identity, growing="data", explain=explain)
        data = self.data() | identity["data"]
        self.write_manifest({**manifest, "identity": identity | {"data": data}})

    def data(self) -> dict[str, str]:
        """Return benchmark -> the hash of the problems that its samples answer; {} without a
        manifest.
        """
        return (self.read_manifest() or {}).get("identity", {}).get("data", {})


def _describe_change(
    name: str, now: Mapping[str, Any], before: Mapping[str, Any]
) -> str:
    """Say in words that model, problems or the judge's code are not as before; "" for any other
    part of the identity. now, before: settings, which name the places.
    """
    part, _, benchmark = name.partition(".")
    words = _WORDS.get(part, "")
    places = []
    for settings in (now, before):
        place = settings.get("judge" if part == "verifier" else "model", NOT_SET)
        if part == "data":
            place = settings.get("data", {}).get(benchmark, benchmark)
        places.append(str(place))
    new, old = places
    if part == "verifier" and (new != old or ":" not in new):
        return ""  # another judge or version, which the identity names
    return words and describe_change(words, new, old, EvaluationDirectory.kind)


def load_settings(
    path: Path | None,
    overrides: Sequence[str],
    options: Mapping[str, object] | None = None,
) -> EvalSettings:
    """Load the settings of an evaluation, see `config.load.load`.

    If a run trained the model, prompt and judge are that run's unless they are set here.
    """
    settings = load(EvalSettings, path, overrides, options)
    return settings.model_copy(
        update=settings_of_run(
            settings.model, settings.model_dump(), settings.model_fields_set
        )
    )


def check_settings(settings: EvalSettings) -> None:
    """Check what can be known before anything heavy is imported; needs neither torch nor a network.

    Errors: `UserError` for a start that cannot succeed.
    """
    check_engine_settings(settings.engine, settings.tp, section="")
    check_installed(settings.engine, section="")
    local_model(settings.model, option="--model")
    if settings.baseline is not None and settings.earlier_baseline is None:
        directory = Path(settings.baseline).expanduser()
        is_model = (directory / "config.json").exists()
        if (directory / "samples").is_dir() and not is_model:
            raise UserError(
                f"--baseline {settings.baseline} is an evaluation that is not finished; finish it "
                "with the same command first"
            )
        local_model(settings.baseline, option="--baseline")
    for name, source in settings.data.items():
        check_source(source, option=f"--data {name}")
    EvaluationDirectory(settings.out).check()
    open_prompt_file(settings.template, option="template")
    model = Path(settings.model).expanduser()  # perhaps the run that had the judge
    make_handed_judge_importable(settings.judge, settings.out, model)
    check_judge(settings.verify, JUDGE_KEYS)
