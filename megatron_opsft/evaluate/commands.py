"""`megatron-opsft eval`: the commands, as users call them."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from megatron_opsft.command_line import RunByDefault, examples
from megatron_opsft.errors import UserError
from megatron_opsft.runtime.loading import loading_libraries
from megatron_opsft.runtime.printable import printable

# Options of earlier versions whose names are not those of settings.
_FORMER = {"deer-threshold": "deer.threshold", "deer-words": "deer.transition_words"}

app = typer.Typer(
    cls=RunByDefault,
    help="Evaluate a model: accuracy and length on benchmarks. `eval ...` is `eval run ...`.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog=examples(
        "megatron-opsft eval --model tiny_reasoner --out runs/eval limit=64",
        "megatron-opsft eval examples/eval/paper.yaml engine=vllm",
        "megatron-opsft eval compare runs/a/eval runs/b/eval --out comparison",
    ),
)


class _Settings(TyperCommand):
    """`--max-tokens 100` is `max_tokens=100`, and so for every setting."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Rewrites what is no option of its own."""
        declared = {name for parameter in self.get_params(ctx) for name in parameter.opts}
        return super().parse_args(ctx, as_settings(args, declared))


def as_settings(args: Sequence[str], declared: Collection[str]) -> list[str]:
    """Command line words with `key=value` for every option that is not declared, and the file for
    `--config FILE`. Errors: `UserError` for one without a value.
    """
    words, rest = [], list(args)
    while rest:
        option, equals, value = rest[0].partition("=")
        word = rest.pop(0)
        if option.startswith("--") and option not in declared:
            name = option.removeprefix("--")
            key = _FORMER.get(name, name.replace("-", "_"))
            if not equals and (not rest or rest[0].startswith("--")):
                raise UserError(f"{option} has no value; write {key}=VALUE")
            value = value if equals else rest.pop(0)
            word = value if name == "config" else f"{key}={value}"
        words.append(word)
    return words


def _option(text: str) -> Any:
    return typer.Option(help=text, show_default=False)


@app.command(
    name="run",
    cls=_Settings,
    epilog=examples(
        "megatron-opsft eval --model tiny_reasoner --out runs/eval limit=64",
        "megatron-opsft eval examples/eval/paper.yaml engine=vllm max_tokens=16384",
        "megatron-opsft eval --model DIR --data mine=problems.jsonl --out DIR",
        "megatron-opsft eval --reference",
    ),
)
def run(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONFIG|KEY=VALUE",
            help="YAML file of settings, then settings on top of it.",
        ),
    ] = None,
    model: Annotated[str | None, _option("What to evaluate.")] = None,
    baseline: Annotated[str | None, _option("What to compare it with.")] = None,
    benchmarks: Annotated[str | None, _option("Such as gsm8k,math500.")] = None,
    data: Annotated[list[str] | None, _option("BENCHMARK=FILE; may be repeated.")] = None,
    out: Annotated[Path | None, _option("Directory to write.")] = None,
    name: Annotated[str | None, _option("Label of the model in tables.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete the evaluation that --out holds.")
    ] = False,
    reference: Annotated[
        bool, typer.Option("--reference", help="Print the table of all settings instead.")
    ] = False,
) -> None:
    """Sample, verify, measure. Several GPUs: torchrun --nproc-per-node N -m megatron_opsft eval.

    The same command continues what is in --out. Settings are KEY=VALUE, --reference lists them;
    some are options too: --model X is model=X.
    """
    from megatron_opsft.config_reference import reference_table
    from megatron_opsft.evaluate.settings import EvalSettings, load_settings

    if reference:
        typer.echo(reference_table(EvalSettings))
        return
    files = [Path(word) for word in words or [] if "=" not in word]
    if len(files) > 1:
        raise UserError(f"eval {files[0]} {files[1]}: give one YAML file, then key=value")
    options = {
        "model": model,
        "baseline": baseline,
        "benchmarks": benchmarks,
        "data": files_of(data or []) or None,
        "out": out,
        "name": name,
    }
    settings = load_settings(
        files[0] if files else None,
        [word for word in words or [] if "=" in word],
        {key: value for key, value in options.items() if value is not None},
    )
    from megatron_opsft.evaluate.early_checks import check_settings

    check_settings(settings)
    with loading_libraries():
        from megatron_opsft.evaluate.run import evaluate

    if table := evaluate(settings, overwrite=overwrite):
        typer.echo(printable(table), nl=False)
        typer.echo(f"results, tables, figures and samples: {settings.out}")


@app.command(
    epilog=examples(
        "megatron-opsft eval compare runs/a/eval runs/b/eval --out comparison",
        "megatron-opsft eval compare a/results.json b --out ab --baseline base_model",
    )
)
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

    typer.echo(printable(compare_directories(results, out, baseline)), nl=False)
    typer.echo(f"table and figures: {out}")


def files_of(given: Sequence[str]) -> dict[str, str]:
    """Benchmark -> file."""
    files: dict[str, str] = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not (equals and name and path):
            raise UserError(f"--data {text}: write BENCHMARK=FILE, for example gsm8k=test.jsonl")
        files[name] = path
    return files
