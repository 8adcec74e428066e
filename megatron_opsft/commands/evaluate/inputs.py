"""All that an evaluation reads before it computes anything: models, problems, prompts, limits."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from megatron_opsft.commands.evaluate.benchmarks import Benchmark, load_benchmarks
from megatron_opsft.commands.evaluate.deer import Deer
from megatron_opsft.commands.evaluate.metrics import powers_up_to
from megatron_opsft.commands.evaluate.settings import EvalSettings
from megatron_opsft.data.prompts import (
    PromptEncoder,
    check_vocabulary,
    end_token_ids,
    load_tokenizer,
)
from megatron_opsft.errors import PromptError, UserError
from megatron_opsft.models.architectures.config_from_hf import read_model_shape
from megatron_opsft.models.storage.large_files import memory_of
from megatron_opsft.models.storage.model_identity import tokenizer_sha256
from megatron_opsft.models.storage.model_paths import TINY_REASONER, resolve_model
from megatron_opsft.models.storage.stored_weights import open_weights
from megatron_opsft.models.weights.rectangles import whole
from megatron_opsft.models.weights.rules import WeightTable
from megatron_opsft.records import JsonObject, TokenIds, record
from megatron_opsft.rollout.limits import engine_traits
from megatron_opsft.run.start.run_directory import ADAPTER
from megatron_opsft.runtime.device import Device
from megatron_opsft.runtime.libraries import installed_versions
from megatron_opsft.section import ChatTemplateName
from megatron_opsft.verify.verifier import describe_judge

MAX_TOKENS = 32768  # the paper's
Prompts = dict[str, TokenIds]
"""Problem key -> token ids of its prompt."""


@record
class EvalModel:
    """An opened model; no weight has been read yet."""

    name: str
    """Its label in tables and figures."""
    directory: Path
    tokenizer: PreTrainedTokenizerBase
    end_tokens: TokenIds
    table: WeightTable

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (HF name, whole tensor on the CPU in the files' dtype), in the table's order."""
        weights = open_weights(self.directory, self.table, check=False)
        for name, shape in self.table.hf_shapes().items():
            yield name, weights.read(whole(name, shape)).view(shape)

    def identity(self) -> JsonObject:
        """Return, as JSON, all of the model that decides a sample: weights, what config.json makes
        of them, tokenizer, end tokens. Reads every weight.
        """
        return {
            "model_sha256": self.weights_sha256(),
            "shape": asdict(self.table.shape),
            "tokenizer_sha256": tokenizer_sha256(self.directory, self.tokenizer),
            "end_tokens": sorted(self.end_tokens),
        }

    def weights_sha256(self) -> str:
        """Return a hash of names, dtypes, shapes and values: the same for any cut or conversion."""
        with ThreadPoolExecutor(8) as pool:
            lines = "".join(pool.map(_describe_tensor, self.tensors()))
        return hashlib.sha256(lines.encode()).hexdigest()


@record
class Inputs:
    """One model and its benchmarks, read and checked; the samples go to `settings.out`."""

    settings: EvalSettings
    model: EvalModel
    benchmarks: tuple[Benchmark, ...]
    encoder: PromptEncoder
    prompts: Prompts
    max_tokens: int
    """Longest response, end token included."""
    batch_size: int
    dtype: Literal["float32", "bfloat16"]
    device: Device

    @property
    def budgets(self) -> tuple[int, ...]:
        """Token budgets of the curves, ascending: a curve shows the accuracy if every sample were
        cut off at the budget.

        Early exit has none: under a smaller limit it would have exited less often.
        """
        if self.settings.method == "deer":
            return ()
        budgets = tuple(sorted(set(self.settings.budgets)))
        return budgets or default_budgets(self.max_tokens)

    def comparable_settings(self) -> JsonObject:
        """Return, as JSON, all settings in which two results may differ, apart from the model and
        the size of benchmarks.
        """
        settings = self.settings
        versions = installed_versions()
        engine = engine_traits(settings.engine)
        names = {
            "method",
            "template",
            "temperature",
            "top_p",
            "seed",
            "engine",
            "verify_timeout",
        }
        has_effect = {
            "deer": settings.method == "deer",
            "system_prompt": settings.system_prompt != "",
            "template_arguments": settings.template_arguments is not None,
            "verify_memory_gb": settings.verify.own_judge,
            "tp": engine.tensor_parallel,
        }
        names |= {name for name in has_effect if has_effect[name]}
        engine_package = next(name for name in engine.packages if name in versions)
        math_verify = f"math-verify {versions['math-verify']}"
        return settings.model_dump(mode="json", include=names) | {
            "max_tokens": self.max_tokens,
            "engine_version": versions[engine_package],
            "torch": versions["torch"],
            "dtype": self.dtype,
            "device": self.device.torch_device.type,
            "verifier": describe_judge(settings.verify, math_verify),
            "data": {
                benchmark.name: benchmark.data.sha256 for benchmark in self.benchmarks
            },
        }

    def manifest(self) -> JsonObject:
        """Return what manifest.json records; `identity` in it is all that decides a sample.

        Reads the whole model for its hash: rank 0 alone calls it.
        """
        return {
            "identity": self.comparable_settings() | self.model.identity(),
            "settings": self.settings.model_dump(mode="json"),
            "versions": installed_versions(),
            "example_prompt": self.model.tokenizer.decode(
                next(iter(self.prompts.values()))
            ),
        }


def read_models(settings: EvalSettings, device: Device) -> list[Inputs]:
    """Read the inputs of the model, and of its baseline if that is still to be evaluated: by the
    same settings, in a directory below. Called by every rank.

    Errors: `UserError` for what would fail later.
    """
    inputs = read_inputs(settings, device)
    if settings.baseline is None or settings.earlier_baseline is not None:
        return [inputs]
    own_settings = {
        "model": settings.baseline,
        "name": None,
        "baseline": None,
        "benchmarks": tuple(benchmark.name for benchmark in inputs.benchmarks),
        "out": settings.out / "baseline",
    }
    base = read_inputs(
        settings.model_copy(update=own_settings), device, option="--baseline"
    )
    if base.model.table.shape != inputs.model.table.shape:
        raise UserError(
            f"--baseline {settings.baseline} is of another architecture, size or rotary scaling "
            "(config.json) than the model, and one engine cannot hold both: evaluate it on its own "
            "with --out DIR, then give --baseline DIR"
        )
    max_tokens = min(inputs.max_tokens, base.max_tokens)
    return [replace(each, max_tokens=max_tokens) for each in (inputs, base)]


def read_inputs(
    settings: EvalSettings, device: Device, *, option: str = "--model"
) -> Inputs:
    """Read the inputs of `settings.model` alone, whatever its baseline is.

    option: what errors call the model. Errors: `UserError`.
    """
    model = open_model(
        settings.model,
        settings.name,
        option=option,
        chat_template=settings.chat_template,
    )
    benchmarks = load_benchmarks(
        settings, is_tiny_reasoner=_has_tiny_tokenizer(model.directory)
    )
    encoder = _open_encoder(model, settings, option)
    prompts = _encode_prompts(encoder, benchmarks)
    if settings.method == "deer":
        Deer(settings.deer, model.tokenizer)  # checks its words
    max_tokens = _max_tokens(settings.max_tokens, model, prompts)
    for budget in settings.budgets:
        if not 1 <= budget <= max_tokens:
            raise UserError(
                f"budgets={budget}: must be from 1 to {max_tokens}, the token limit of the run"
            )
    dtype = settings.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device.is_cuda else "float32"
    return Inputs(
        settings=settings,
        model=model,
        benchmarks=benchmarks,
        encoder=encoder,
        prompts=prompts,
        max_tokens=max_tokens,
        batch_size=settings.batch_size
        or engine_traits(settings.engine).eval_batch_size,
        dtype=dtype,
        device=device,
    )


def _has_tiny_tokenizer(directory: Path) -> bool:
    """Return True for the shipped tiny reasoner, and for that model trained further."""
    tokenizer = directory / "tokenizer.json"
    shipped = resolve_model(TINY_REASONER) / "tokenizer.json"
    return tokenizer.is_file() and tokenizer.read_bytes() == shipped.read_bytes()


def default_budgets(max_tokens: int) -> tuple[int, ...]:
    """Return up to six powers of two below the limit of the run, then the limit itself: 1,024 ...
    16,384, 32,768.
    """
    # Six powers of two lie between a 64th of the limit and the limit.
    return tuple(
        budget for budget in powers_up_to(max_tokens) if budget > max_tokens / 64
    )


def _open_encoder(
    model: EvalModel, settings: EvalSettings, option: str
) -> PromptEncoder:
    """Return what makes prompts of problems. Errors: `UserError` for a chat template that does not
    take what the settings give it, or that leaves early exit nothing to leave.
    """
    encoder = PromptEncoder(
        tokenizer=model.tokenizer,
        template=settings.template,
        system_prompt=settings.system_prompt,
        template_arguments=settings.template_arguments,
    )
    encoder.check(option=option, section="")
    thinking_ends = encoder.example.rstrip().endswith(settings.deer.think_end)
    if settings.method == "deer" and thinking_ends:
        raise UserError(
            f"method=deer: the prompts end with {settings.deer.think_end}, so there is no thinking "
            "to leave; give template_arguments={}, or leave method out"
        )
    return encoder


def _encode_prompts(encoder: PromptEncoder, benchmarks: Sequence[Benchmark]) -> Prompts:
    """Encode the prompts of all problems. Errors: `UserError` naming the problem."""
    prompts = {}
    for benchmark in benchmarks:
        for key, problem in benchmark.problems_by_key().items():
            try:
                prompts[key] = encoder.encode(problem)
            except PromptError as error:
                raise UserError(
                    f"problem {key}: {error}; change it, or leave it out"
                ) from None
    return prompts


def _max_tokens(wanted: int | None, model: EvalModel, prompts: Prompts) -> int:
    """Return the limit of a response: `wanted`, else as much of the paper's limit as fits.

    Errors: `UserError` if the model has no room for it after the longest prompt.
    """
    longest = max(prompts, key=lambda key: len(prompts[key]))
    num_prompt_tokens = len(prompts[longest])
    positions = model.table.shape.max_position_embeddings
    room = positions - num_prompt_tokens
    required = wanted or 1
    if room < required:
        fix = f"set max_tokens={room} or less" if room > 0 else "leave that problem out"
        raise UserError(
            f"{model.name} has {positions} positions (max_position_embeddings), and "
            f"problem {longest} takes {num_prompt_tokens} of them: no room for "
            f"{required} response tokens; {fix}"
        )
    return wanted or min(MAX_TOKENS, room)


def open_model(
    path: str,
    name: str | None = None,
    *,
    option: str = "--model",
    chat_template: ChatTemplateName | None = None,
) -> EvalModel:
    """Find a model, by what `resolve_model` takes, and check it without reading its weights.

    option: what errors call it. chat_template: see `load_tokenizer`. Errors: `UserError` for a
    missing, damaged or unsupported model, a tokenizer without a chat template or of another model.
    """
    directory = resolve_model(path, option=option)
    tokenizer = load_tokenizer(directory, option=option, chat_template=chat_template)
    shape = read_model_shape(directory)
    table = WeightTable(shape, "te")
    open_weights(directory, table)
    end_tokens = end_token_ids(tokenizer, directory, option=option)
    check_vocabulary(tokenizer, end_tokens, shape.vocab_size, directory, option=option)
    return EvalModel(
        name=name or _default_name(path, directory),
        directory=directory,
        tokenizer=tokenizer,
        end_tokens=end_tokens,
        table=table,
    )


def _default_name(path: str, directory: Path) -> str:
    """Return what people call a model: the end of its name on the hub, or its folder; the run's
    folder rather than `hf` in it, with the rank of the run's LoRA adapter if it has one.
    """
    if not Path(path).expanduser().exists():
        return path.rpartition("/")[2]
    if directory.name != "hf":
        return directory.resolve().name
    run = directory.resolve().parent
    adapter_config = run / ADAPTER / "adapter_config.json"
    if not adapter_config.is_file():
        return run.name
    rank = json.loads(adapter_config.read_text(encoding="utf-8"))["r"]
    return f"{run.name} (LoRA, rank {rank})"


def _describe_tensor(named_tensor: tuple[str, Tensor]) -> str:
    """Return a line with name, dtype, shape and hash of the values of a tensor on the CPU."""
    name, tensor = named_tensor
    digest = hashlib.sha256(memory_of(tensor.contiguous())).hexdigest()
    return f"{name} {tensor.dtype} {tuple(tensor.shape)} {digest}\n"
