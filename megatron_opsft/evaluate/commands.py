"""`megatron-opsft eval`: the commands, as users call them."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_opsft.errors import UserError

app = typer.Typer(
    help="Evaluate a model: accuracy and length on benchmarks, with intervals, tables and figures.",
    invoke_without_command=True,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


class Engine(StrEnum):
    """Values of --engine."""

    HF = "hf"
    VLLM = "vllm"


class Method(StrEnum):
    """Values of --method."""

    SAMPLE = "sample"
    DEER = "deer"


class Template(StrEnum):
    """Values of --template."""

    R1 = "r1"
    COD = "cod"
    CHAT = "chat"


class Dtype(StrEnum):
    """Values of --dtype."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class DeviceName(StrEnum):
    """Values of --device."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Delete the evaluation that --out holds.")
]


def _option(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, show_default=False)


@app.callback()
def evaluate(
    context: typer.Context,
    config: Annotated[Path | None, _option("YAML file of these settings; options win.")] = None,
    model: Annotated[
        str | None,
        _option("Hugging Face directory or hub name, run directory, checkpoint, tiny_reasoner."),
    ] = None,
    out: Annotated[Path | None, _option("Directory to write; the same command goes on.")] = None,
    baseline: Annotated[
        str | None, _option("Model, or directory of an earlier evaluation, to compare with.")
    ] = None,
    benchmarks: Annotated[
        str | None,
        _option("Such as gsm8k,math500,amc23,aime24,aime25 (the default), arithmetic, your own."),
    ] = None,
    data: Annotated[
        list[str] | None, _option("BENCHMARK=FILE (.jsonl, .jsonl.gz, .parquet); may be repeated.")
    ] = None,
    engine: Annotated[Engine | None, _option("hf (the default) or vllm.")] = None,
    method: Annotated[Method | None, _option("sample (the default) or deer: early exit.")] = None,
    deer_threshold: Annotated[
        float | None, _option("Confidence of a trial answer above which thinking ends; 0.95.")
    ] = None,
    deer_words: Annotated[
        str | None, _option("Transition words at which an answer is tried, such as Wait,But.")
    ] = None,
    template: Annotated[
        Template | None, _option("r1: step by step (the default); cod: Chain of Draft; chat.")
    ] = None,
    temperature: Annotated[float | None, _option("0.6 by default.")] = None,
    top_p: Annotated[float | None, _option("0.95 by default.")] = None,
    max_tokens: Annotated[
        int | None, _option("Longest response; 32,768, or what the model's positions allow.")
    ] = None,
    samples: Annotated[
        int | None, _option("N per problem; by default 16 or 64 by benchmark.")
    ] = None,
    limit: Annotated[int | None, _option("Only the first so many problems of each.")] = None,
    seed: Annotated[int | None, _option("Of all responses; 0.")] = None,
    budgets: Annotated[
        str | None, _option("Token budgets of the curves, such as 1024,2048,4096.")
    ] = None,
    dtype: Annotated[Dtype | None, _option("auto: bfloat16 on a GPU, float32 on a CPU.")] = None,
    device: Annotated[DeviceName | None, _option("auto: cuda where there is one.")] = None,
    batch_size: Annotated[
        int | None, _option("Responses decoded at once by an engine; 64 (hf), 256 (vllm).")
    ] = None,
    tp: Annotated[int | None, _option("Ranks that share one vLLM engine; 1.")] = None,
    gpu_memory_fraction: Annotated[
        float | None, _option("Share of a GPU that vLLM takes; 0.9.")
    ] = None,
    name: Annotated[str | None, _option("Label of the model in tables and figures.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Sample, verify, measure. Several GPUs: torchrun --nproc-per-node N -m megatron_opsft eval.

    `eval compare` makes one table and figure of several results.
    """
    if context.invoked_subcommand is not None:
        return
    from megatron_opsft.config_file import read_yaml, validated
    from megatron_opsft.evaluate.run import evaluate as run_evaluation
    from megatron_opsft.evaluate.settings import EvalSettings

    given: dict[str, Any] = {
        "model": model,
        "name": name,
        "baseline": baseline,
        "benchmarks": _words("--benchmarks", benchmarks),
        "data": _pairs(data),
        "out": out,
        "engine": engine,
        "method": method,
        "template": template,
        "temperature": temperature,
        "top_p": top_p,
        "max_tokens": max_tokens,
        "samples": samples,
        "limit": limit,
        "seed": seed,
        "budgets": _words("--budgets", budgets),
        "dtype": dtype,
        "device": device,
        "batch_size": batch_size,
        "tp": tp,
        "gpu_memory_fraction": gpu_memory_fraction,
    }
    tree = read_yaml(config) if config is not None else {}
    tree |= {key: value for key, value in given.items() if value is not None}
    words = _words("--deer-words", deer_words)
    deer = {"threshold": deer_threshold, "transition_words": words}
    deer = {key: value for key, value in deer.items() if value is not None}
    if deer:
        tree["deer"] = (tree.get("deer") or {}) | deer
    settings = validated(EvalSettings, tree, str(config) if config else "the command line")
    if table := run_evaluation(settings, overwrite=overwrite):
        typer.echo(table, nl=False)
        typer.echo(f"results, tables, figures and samples: {settings.out}")


@app.command()
def compare(
    results: Annotated[
        list[Path], typer.Argument(help="Directories of evaluations, or results.json files.")
    ],
    out: Annotated[Path, typer.Option(help="Directory for the table and the figures.")],
    baseline: Annotated[
        str | None, typer.Option(help="Label of the model that is 100 % of every CR.")
    ] = None,
) -> None:
    """One table and figure of several results; names every setting in which they differ."""
    from megatron_opsft.evaluate.outputs import compare_directories

    typer.echo(compare_directories(results, out, baseline), nl=False)
    typer.echo(f"table and figures: {out}")


def _words(option: str, text: str | None) -> list[str] | None:
    """The parts between commas; YAML's types are made of them later."""
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise UserError(f"{option} {text}: write words with one comma between them")
    return words


def _pairs(given: list[str] | None) -> dict[str, str] | None:
    if not given:
        return None
    pairs: dict[str, str] = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not (equals and name and path):
            raise UserError(f"--data {text}: write BENCHMARK=FILE, for example gsm8k=test.jsonl")
        pairs[name] = path
    return pairs
