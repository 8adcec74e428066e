"""`megatron-opsft eval`: the commands, as users call them."""

from pathlib import Path

from megatron_opsft.commands.command_line import Command, group, reference_table
from megatron_opsft.commands.evaluate.settings import (
    EvalSettings,
    check_settings,
    load_settings,
)
from megatron_opsft.errors import UserError
from megatron_opsft.runtime.console import say
from megatron_opsft.runtime.libraries import loading_libraries


class Evaluate(Command):
    """Evaluate a model: accuracy and length on benchmarks.

    Several GPUs: torchrun --nproc-per-node N -m megatron_opsft eval. The same command continues
    what is in --out. Settings are KEY=VALUE or --key VALUE: model, baseline, benchmarks,
    data.NAME=FILE, out, name, engine, samples, limit, max_tokens and more; --reference lists all of
    them. A YAML file of settings may come first.
    """

    words = ("config",)
    keys_of = EvalSettings
    examples = (
        "eval --model tiny_reasoner --out runs/eval limit=64",
        "eval examples/eval/paper.yaml engine=vllm max_tokens=16384",
        "eval --model DIR data.mine=problems.jsonl --out DIR",
        "eval --reference",
    )
    config: Path | None = None
    """YAML file of settings."""
    overwrite: bool = False
    """Delete the evaluation that --out holds."""
    reference: bool = False
    """Print the table of all settings instead."""

    def run(self) -> None:
        """Evaluate, or print the table of settings."""
        if self.reference:
            say(reference_table(EvalSettings))
            return
        settings = load_settings(self.config, self.keys)
        check_settings(settings)
        with loading_libraries():
            from megatron_opsft.commands.evaluate.run import evaluate

        table = evaluate(settings, overwrite=self.overwrite)
        if table:  # on rank 0
            say(table, end="")
            say(f"results, tables, figures and samples: {settings.out}")


class Compare(Command):
    """One table and page of results, or of one and its baseline; names settings that differ."""

    words = ("results",)
    examples = (
        "eval compare runs/a/eval runs/b/eval --out comparison",
        "eval compare runs/a/eval runs/b/eval --out ab --baseline b",
    )
    results: tuple[Path, ...]
    """Directories of evaluations."""
    out: Path
    """Directory for table.md and report.html."""
    baseline: str | None = None
    """Label of the model that is 100 % of every CR."""

    def run(self) -> None:
        """Compare as `report` does, then write and print the table.

        Errors: `UserError` as of `compare_directories`, and for an --out that has a table.
        """
        from megatron_opsft.commands.evaluate.comparison import compare_directories

        comparison, directories = compare_directories(
            self.results, baseline=self.baseline
        )
        if self.out.is_file() or (self.out / "table.md").exists():
            raise UserError(
                f"--out {self.out} is a file or holds a table.md; name another one"
            )
        comparison.write(self.out, directories)
        say(comparison.text(), end="")
        say(f"table and page: {self.out}")


PROGRAM = group(
    "eval",
    "Evaluate a model: accuracy and length on benchmarks. `eval ...` is `eval run ...`.",
    {"run": Evaluate, "compare": Compare},
    (*Evaluate.examples[:2], Compare.examples[0]),
)
