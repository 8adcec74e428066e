"""The configuration of a run: frozen, nested, checked once; YAML plus dotted overrides.

A function receives its own section, never the whole. `config_file.load_config` is the only way in.
"""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator

from megatron_opsft.config_section import (
    SHIPPED_JUDGES,
    CommaSeparated,
    HomeExpanded,
    JudgeName,
    MixturePart,
    Section,
    Sources,
    TemplateName,
    YamlOff,
)
from megatron_opsft.errors import UserError
from megatron_opsft.methods.catalog import with_class
from megatron_opsft.methods.catalog.on_policy_sft import OnPolicySftSettings
from megatron_opsft.methods.settings import MethodSettings, RunSize


class RunConfig(Section):
    dir: Annotated[Path, HomeExpanded] = Field(
        Path("runs/default"), description="Run directory; everything the run writes is below it."
    )
    steps: int = Field(
        300, ge=0, description="Training steps: one rollout batch and one update each."
    )
    seed: int = Field(0, ge=0, description="Seed of the problem order and of every response.")
    eval_every: int = Field(
        0,
        ge=0,
        description="Evaluate every so many steps; 0: only before the first and after the last.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: cuda where there is one."
    )
    export_every: int = Field(
        0, ge=0, description="Write a Hugging Face model to exports/ every so many steps; 0: never."
    )
    show_samples: int = Field(
        1,
        ge=0,
        description="So many responses of an evaluation, to the same problems each time, are shown on the console, in TensorBoard and W&B.",
    )
    save_rollouts: bool = Field(True, description="Keep every response of every step in rollouts/.")
    save_logprobs: bool = Field(
        False,
        description="With them the log-probability of each token when it was sampled, by a pass of the trainer over all responses; the report colours tokens by it.",
    )
    tensorboard: bool = Field(True, description="Write TensorBoard events.")
    wandb: Annotated[Literal["off", "offline", "online"], YamlOff] = Field(
        "off", description="Weights & Biases; needs `pip install wandb`."
    )
    wandb_project: str = Field("megatron-opsft", description="Project name at Weights & Biases.")
    max_minutes: float = Field(
        0,
        ge=0,
        description="Checkpoint and leave with exit code 75 after so many minutes; 0: never.",
    )
    hang_minutes: float = Field(
        60,
        ge=0,
        description="A rank that stays in one phase (rollout, train, ...) for so long ends the run with exit code 69: more than the longest takes. Collectives time out a minute later; 0: never.",
    )
    silence_seconds: float = Field(
        60,
        gt=0,
        description="So does a rank whose process gives no sign of life for so long; one that dies is noticed at once.",
    )
    deterministic: bool = Field(
        False,
        description="On GPUs the same numbers in every repetition on the same GPUs, bit for bit: deterministic attention, embedding and matrix products, and vLLM's batch-invariant kernels. Slower (docs/gpu.md); a CPU needs none of it.",
    )

    @property
    def collective_minutes(self) -> float:
        """After which collectives give up: the watchdog speaks first, since what a time-out says
        names nobody.
        """
        return self.hang_minutes + 1 if self.hang_minutes else 7 * 24 * 60


class ModelConfig(Section):
    path: Annotated[str, HomeExpanded] = Field(
        ...,
        description="A Hugging Face directory or hub name, a run (its `hf/`), a checkpoint of a run or a converted one, or `tiny_reasoner` (shipped).",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "bfloat16",
        description="Of weights and activations; main weights and gradients are float32.",
    )
    load: Literal["auto", "disk", "engine"] = Field(
        "auto",
        description="disk: every rank reads its shards from the files. engine: colocated vLLM alone reads the files, and the shards are filled from its parameters; from disk where it holds them packed or in an unknown layout. auto: engine where it can, else disk.",
    )


class DataConfig(Section):
    train: Sources = Field(
        ...,
        description="`arithmetic` (embedded), a .jsonl/.jsonl.gz/.parquet file, or a Hugging Face data set name; or a list of {path, weight}, a mixture (docs/data.md).",
    )
    split: str = Field("train", description="Split of a Hugging Face data set.")
    subset: str | None = Field(
        None, description="Configuration name of a Hugging Face data set, such as `main` of gsm8k."
    )
    problem_field: str | None = Field(
        None,
        description="Field of the problem: text, or a list of chat messages; a dotted name reaches into objects. By default the first of problem, question, prompt.",
    )
    answer_field: str | None = Field(
        None,
        description="Field of the gold answer, which may be dotted, such as reward_model.ground_truth; by default the first of answer, final_answer, solution.",
    )
    duplicates: Literal["keep", "first", "drop"] = Field(
        "keep",
        description="Rows with the same problem. first: all but the first are bad rows; drop: problems whose rows have different answers too.",
    )
    pass_rate: tuple[float, float] | None = Field(
        None,
        description="Train only on problems that were solved in so large a share of an evaluation's responses, such as [0.1, 0.9], both included; the others are bad rows.",
    )
    pass_rate_from: Annotated[Path | None, HomeExpanded] = Field(
        None, description="Directory of that evaluation, which must be of the same problems."
    )
    responses: Annotated[Path | None, HomeExpanded] = Field(
        None,
        description="Fixed data, written by the command `data`, for a method that samples nothing; B x G responses a step.",
    )
    prompts_per_step: int = Field(64, ge=1, description="B: problems drawn in each step.")
    max_prompt_tokens: int = Field(
        1024,
        ge=1,
        description="Problems with a longer prompt are bad rows: listed and left out. Where it is not set, less if the model has no room for it beside the longest response.",
    )
    template: TemplateName = Field(
        "r1",
        description="r1: step by step; cod: Chain of Draft; chat: the problem alone; or the path of a .jinja file that makes the user's message of `problem` and `row` (docs/data.md). All through the model's chat template.",
    )
    system_prompt: str = Field(
        "",
        description="What the model is told before each problem; rows that are chat messages with a system message keep theirs.",
    )

    @property
    def parts(self) -> tuple[MixturePart, ...]:
        """The sources of `train`, with what they do not say themselves."""
        given = (MixturePart(path=self.train),) if isinstance(self.train, str) else self.train
        own = ("split", "subset", "problem_field", "answer_field")
        return tuple(
            part.model_copy(update={key: getattr(part, key) or getattr(self, key) for key in own})
            for part in given
        )

    @property
    def name(self) -> str:
        """What `train` is called in messages."""
        return " + ".join(part.path for part in self.parts)

    @model_validator(mode="after")
    def _pass_rate_is_whole(self) -> Self:
        """Errors: `UserError` for bounds without an evaluation, and the other way round."""
        if (self.pass_rate is None) != (self.pass_rate_from is None):
            raise UserError(
                "data.pass_rate and data.pass_rate_from (the directory of an evaluation) go "
                "together; set both"
            )
        if self.pass_rate is not None and not 0 <= self.pass_rate[0] <= self.pass_rate[1] <= 1:
            raise UserError(
                f"data.pass_rate={list(self.pass_rate)}: write [LOW, HIGH], both from 0 to 1"
            )
        return self


class RolloutConfig(Section):
    engine: str = Field("hf", description="hf: Hugging Face transformers; vllm: vLLM.")
    placement: Literal["colocated", "separate"] = Field(
        "colocated",
        description="colocated: inside the training ranks; separate: in processes of its own, started and watched by the run.",
    )
    tp: int = Field(
        1, ge=1, description="Tensor-parallel size of one vLLM engine; need not be parallel.tp."
    )
    num_engines: int = Field(
        1, ge=1, description="How many separate engines; colocated there are world size / tp."
    )
    gpu_memory_fraction: float = Field(
        0.5, gt=0, lt=1, description="Share of a GPU that vLLM fills with weights and KV cache."
    )
    kv_cache_bytes: int | None = Field(
        None,
        ge=1,
        description="KV cache of each vLLM rank; by default what gpu_memory_fraction leaves, on a CPU what batch_size needs.",
    )
    engine_timeout_seconds: float = Field(
        300.0,
        gt=0,
        description="A separate engine that shows no sign of life for so long is killed and started anew.",
    )
    engines: Annotated[tuple[str, ...], CommaSeparated] = Field(
        (),
        description="Addresses (host:port) of separate engines on other nodes, each a running `megatron-opsft engine`; by default the run starts its own. Slurm jobs with --rollout-nodes fill it in.",
    )
    engine_token_file: Annotated[Path | None, HomeExpanded] = Field(
        None,
        description="File with the secret that trainer and engines share, readable by you alone; by default the environment variable MEGATRON_OPSFT_ENGINE_TOKEN.",
    )
    group_size: int = Field(8, ge=1, description="G: responses sampled for each problem.")
    temperature: float = Field(
        1.0,
        gt=0,
        description="Sampling temperature; anything but 1 is off-policy and gets a warning.",
    )
    top_p: float = Field(0.95, gt=0, le=1, description="Nucleus sampling.")
    max_response_tokens: int = Field(
        3500, ge=1, description="L: longest response, end token included."
    )
    batch_size: int = Field(256, ge=1, description="Responses decoded at once by one engine.")
    dealing: Literal["auto", "fixed", "stealing"] = Field(
        "auto",
        description="Of a step's responses to several engines. stealing: an engine that has room takes what another one has not begun; fixed: each makes what it is dealt at first; auto: stealing where a response does not depend on what is decoded beside it (the HF engine in float32, vLLM on GPUs without rollout.speculation).",
    )
    overlap: bool = Field(
        False,
        description="Add up the gradients of accepted responses while separate engines decode the others; method.name=on_policy_sft alone. The same step up to rounding, which depends on what is ready when.",
    )
    speculation: Annotated[Literal["off", "ngram", "suffix"], YamlOff] = Field(
        "off",
        description="Drafts that one forward pass checks: ngram takes them from the response itself, suffix also from its siblings and from earlier responses to the problem. With hf responses are the same tokens; with vllm they keep their distribution, but its seeds then depend on earlier drafts: a resumed or repeated run samples other responses.",
    )

    draft_model: Annotated[Path | None, HomeExpanded] = Field(
        None,
        description="Directory of an EAGLE-3 (or EAGLE) head for the model, which drafts in vLLM in place of rollout.speculation; it is not trained. Responses keep their distribution, but seeds then depend on earlier drafts, as with speculation in vLLM.",
    )
    draft_tokens: int = Field(
        3, ge=1, description="Tokens that the draft model drafts for one forward pass."
    )

    @model_validator(mode="after")
    def _drafts_have_one_source(self) -> Self:
        """Errors: `UserError` where two would draft."""
        if self.draft_model is not None and self.speculation != "off":
            raise UserError(
                f"rollout.draft_model={self.draft_model} with rollout.speculation="
                f"{self.speculation}: drafts have one source; leave one of them out"
            )
        return self

    @property
    def speculates(self) -> bool:
        """Whether an engine decodes with drafts."""
        return self.speculation != "off" or self.draft_model is not None

    @model_validator(mode="after")
    def _engines_are_separate(self) -> Self:
        """Errors: `UserError` for addresses that nobody would ask."""
        if self.engines and self.placement != "separate":
            raise UserError(
                "rollout.engines: engines on other nodes are separate ones; set "
                "rollout.placement=separate"
            )
        if self.engines and self.num_engines not in (1, len(self.engines)):
            raise UserError(
                f"rollout.num_engines={self.num_engines}, but rollout.engines has "
                f"{len(self.engines)} addresses; leave num_engines out"
            )
        return self

    @property
    def num_separate(self) -> int:
        """How many separate engines there are."""
        return len(self.engines) or self.num_engines


class VerifyConfig(Section):
    judge: JudgeName = Field(
        "math",
        description="Who judges an answer: math, choice (A to E), exact, regex, or a function of your own, package.module:function (docs/judges.md).",
    )
    judge_field: str | None = Field(
        None,
        description="Field of a row, which may be dotted, that names the row's own judge: a shipped one, or that of verify.judge; rows without it have verify.judge.",
    )
    workers: int = Field(
        0, ge=0, description="Most verifier processes of a rank; 0: its share of the CPU cores."
    )
    timeout_seconds: float = Field(
        10.0,
        gt=0,
        description="Wall-clock limit for one answer; a worker beyond it is killed and replaced.",
    )

    @property
    def own_judge(self) -> bool:
        """Whether `judge` is a function of the user's."""
        return self.judge not in SHIPPED_JUDGES

    @property
    def needs_fields(self) -> bool:
        """Whether a verdict takes more of a row than its answer."""
        return self.own_judge or self.judge_field is not None


class OptimizerConfig(Section):
    lr: float = Field(1e-7, gt=0, description="AdamW learning rate after warm-up.")
    warmup_steps: int = Field(0, ge=0, description="Steps of linear warm-up.")
    schedule: Literal["constant", "cosine"] = Field(
        "constant", description="After warm-up; cosine reaches min_lr at the last step."
    )
    min_lr: float = Field(0.0, ge=0, description="Learning rate at the end of the cosine schedule.")
    weight_decay: float = Field(
        0.0, ge=0, description="Decoupled weight decay; never on biases and norms."
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW.")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW.")
    eps: float = Field(1e-8, gt=0, description="AdamW.")
    clip_grad: float = Field(1.0, ge=0, description="Largest gradient norm; 0: no clipping.")


class ParallelConfig(Section):
    tp: int = Field(1, ge=1, description="Tensor-parallel size.")
    pp: int = Field(1, ge=1, description="Pipeline-parallel size.")
    cp: int = Field(
        1, ge=1, description="Context-parallel size: so many ranks share every sequence of a pack."
    )
    ep: int = Field(
        1,
        ge=1,
        description="Expert-parallel size: so many ranks share the experts of a mixture, each with whole ones.",
    )
    etp: int | None = Field(
        None,
        ge=1,
        description="Tensor-parallel size of the experts; null: parallel.tp. Only with parallel.ep above 1.",
    )
    vpp: int | None = Field(
        None, ge=2, description="Virtual pipeline stages on each pipeline rank (interleaved 1F1B)."
    )
    sequence_parallel: bool = Field(
        False, description="Shard the norms' activations over the tensor-parallel ranks."
    )
    overlap_grad_reduce: bool = Field(
        True,
        description="Reduce gradients over the data-parallel ranks while the backward pass still runs.",
    )
    overlap_param_gather: bool = Field(
        True,
        description="Gather updated weights from the data-parallel ranks while the rollout engine wakes up for them; only with overlap_grad_reduce.",
    )

    @property
    def expert_tp(self) -> int:
        """Ranks that each expert is cut over."""
        return self.etp or self.tp

    @property
    def replica_size(self) -> int:
        """Ranks of one data-parallel replica."""
        return self.tp * self.pp * self.cp

    @property
    def replica(self) -> str:
        """Their number, for a message."""
        if self.cp == 1:
            return f"parallel.tp x parallel.pp = {self.tp} x {self.pp}"
        return f"parallel.tp x parallel.pp x parallel.cp = {self.tp} x {self.pp} x {self.cp}"


class TrainConfig(Section):
    max_tokens_per_microbatch: int = Field(
        16384,
        ge=1,
        description="Packing budget of a rank, so that packs hold parallel.cp times as many; a longer sequence gets a micro-batch of its own.",
    )
    cross_entropy: Literal["auto", "te", "vocab_parallel", "fused_linear"] = Field(
        "auto",
        description="te: TransformerEngine's, on all logits of the response tokens; vocab_parallel: Megatron's, on the same; fused_linear: from hidden states, a chunk of logits at a time; auto: the fastest that is there and fits.",
    )
    recompute: Literal["none", "selective", "full"] = Field(
        "none",
        description="Activations computed again in the backward pass. selective: each layer's feed-forward part, which holds most of them; full: whole layers.",
    )
    offload_layers: int = Field(
        0,
        ge=0,
        description="So many layers' activations wait in CPU memory for the backward pass; needs TransformerEngine, parallel.pp=1 and no recomputation.",
    )


class SyncConfig(Section):
    verify: Annotated[Literal["off", "checksum", "full"], YamlOff] = Field(
        "full",
        description="Proof after every push of weights: checksums of every engine parameter; full: log-probs of some responses as well.",
    )
    bucket_mb: int = Field(
        256, ge=1, description="Weights travel in buckets of so many MiB, two at a time."
    )
    delta: bool = Field(
        False,
        description="To engines in processes of their own that weights go straight to: send only the elements whose bits have changed since the push before, where that is less. It keeps a copy of the shards.",
    )
    logprob_alarm: float | None = Field(
        None,
        gt=0,
        description="Mean difference of engine and trainer log-probs that raises an alarm; by default 0.001 in float32, 0.05 in bfloat16.",
    )


class EvalSet(Section):
    """More held-out problems, sampled as those of `eval`; None: as there."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_]+$")]
    data: Annotated[str, HomeExpanded]
    split: str | None = None
    subset: str | None = None
    problem_field: str | None = None
    answer_field: str | None = None
    num_problems: int | None = Field(None, ge=1)
    samples_per_problem: int | None = Field(None, ge=1)


def _named_sets(value: object) -> object:
    """A mapping as a list: `NAME: SOURCE` is short for `NAME: {data: SOURCE}`."""
    if not isinstance(value, dict):
        return value
    return [
        {"name": name} | (given if isinstance(given, dict) else {"data": given})
        for name, given in value.items()
    ]


class EvalConfig(Section):
    data: Annotated[str | None, HomeExpanded] = Field(
        None,
        description="Held-out problems; by default the test split of data.train, or no evaluation where it has none.",
    )
    split: str | None = Field(
        None, description="Split of a Hugging Face data set; by default its `test`."
    )
    subset: str | None = Field(
        None,
        description="Configuration name of a Hugging Face data set; by default data.subset where eval.data is not set.",
    )
    problem_field: str | None = Field(
        None,
        description="Field of the problem text; by default data.problem_field where eval.data is not set, else as there.",
    )
    answer_field: str | None = Field(
        None,
        description="Field of the gold answer; by default data.answer_field where eval.data is not set, else as there.",
    )
    holdout: int = Field(
        0,
        ge=0,
        description="Take so many problems out of data.train, drawn with run.seed, and evaluate on them; not with eval.data.",
    )
    num_problems: int = Field(
        256, ge=1, description="How many of them, the first ones of a fixed shuffle."
    )
    samples_per_problem: int = Field(2, ge=1, description="N: responses to each.")
    temperature: float = Field(0.6, gt=0, description="Sampling temperature in evaluation.")
    top_p: float = Field(0.95, gt=0, le=1, description="Nucleus sampling in evaluation.")
    max_response_tokens: int | None = Field(
        None, ge=1, description="By default rollout.max_response_tokens."
    )
    more: Annotated[tuple[EvalSet, ...], BeforeValidator(_named_sets)] = Field(
        (),
        description="More sets, a mapping: NAME to a source, or to {data, split, subset, problem_field, answer_field, num_problems, samples_per_problem}. They are evaluated with eval's and decide nothing.",
    )
    best_within: float = Field(
        0.01,
        ge=0,
        le=1,
        description="The best evaluation has the fewest mean response tokens of those that lose at most so much accuracy against the base model's.",
    )
    export_best: bool = Field(
        False,
        description="Keep the model of the best evaluation so far, if it is better than the base model, in best/.",
    )
    patience: int = Field(
        0,
        ge=0,
        description="Finish the run when so many evaluations in a row were not the best so far; 0: never.",
    )


class CheckpointConfig(Section):
    every: int = Field(
        50, ge=0, description="Steps between checkpoints; 0: only at the end and on SIGTERM."
    )
    keep: int = Field(2, ge=1, description="How many of the newest to keep.")
    asynchronous: bool = Field(
        True,
        description="Write in the background, from a copy in CPU memory; the last one is waited for.",
    )


class Config(Section):
    """One run, whole."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    method: Annotated[SerializeAsAny[MethodSettings], BeforeValidator(with_class)] = (
        OnPolicySftSettings()
    )
    verify: VerifyConfig = VerifyConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    parallel: ParallelConfig = ParallelConfig()
    train: TrainConfig = TrainConfig()
    sync: SyncConfig = SyncConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @model_validator(mode="after")
    def _method_fits(self) -> Self:
        """Errors: `UserError` where the method cannot be had with the other sections."""
        self.method.check(
            RunSize(
                group_size=self.rollout.group_size,
                prompts_per_step=self.data.prompts_per_step,
                max_response_tokens=self.rollout.max_response_tokens,
            )
        )
        return self
