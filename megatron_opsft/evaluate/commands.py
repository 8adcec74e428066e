"""`megatron-opsft eval`: the commands, as users call them."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from megatron_opsft.command_line import Command, reference_table
from megatron_opsft.config_section import Section
from megatron_opsft.evaluate.settings import EvalSettings, check_settings, load_settings
from megatron_opsft.runtime.console import printable
from megatron_opsft.runtime.libraries import loading_libraries


class Evaluate(Command):
    """Evaluate a model: accuracy and length on benchmarks.

    Several GPUs: torchrun --nproc-per-node N -m megatron_opsft eval. The same command continues
    what is in --out. Settings are KEY=VALUE or --key VALUE: model, baseline, benchmarks,
    data.NAME=FILE, out, name, engine, samples, limit, max_tokens and more; --reference lists all of
    them. A YAML file of settings may come first.
    """

    words: ClassVar[tuple[str, ...]] = ("config",)
    keys_of: ClassVar[type[Section] | None] = EvalSettings
    examples: ClassVar[tuple[str, ...]] = (
        "eval --model tiny_reasoner --out runs/eval limit=64",
        "eval examples/eval/paper.yaml engine=vllm max_tokens=16384",
        "eval --model DIR data.mine=problems.jsonl --out DIR",
        "eval --reference",
    )
    config: Path | None = Field(None, description="YAML file of settings.")
    keys: tuple[str, ...] = ()
    overwrite: bool = Field(False, description="Delete the evaluation that --out holds.")
    reference: bool = Field(False, description="Print the table of all settings instead.")

    def run(self) -> None:
        """Evaluate, or print the settings."""
        if self.reference:
            print(reference_table(EvalSettings))
            return
        settings = load_settings(self.config, self.keys)
        check_settings(settings)
        with loading_libraries():
            from megatron_opsft.evaluate.run import evaluate

        if table := evaluate(settings, overwrite=self.overwrite):
            print(printable(table), end="")
            print(f"results, tables, figures and samples: {settings.out}")
