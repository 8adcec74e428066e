"""`megatron-opsft convert`: its commands and their options."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import ByteSize, Field

from megatron_opsft.commands.command_line import Command, group
from megatron_opsft.errors import ANSWER_IS_NO, UserError
from megatron_opsft.runtime.console import say

if TYPE_CHECKING:
    from megatron_opsft.commands.convert.run import Source


class _Conversion(Command):
    out: Path
    """Directory to write."""
    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    """Cast to it; by default as in the source."""
    shard_size: ByteSize = Field("5GB", gt=0, lt=2**63, validate_default=True)
    """Largest file, such as 5GB or 500MB."""
    overwrite: bool = False
    """Replace the model or conversion at --out."""
    verify: bool = False
    """Read everything back and compare it, tensor by tensor."""
    as_json: bool = Field(False, alias="json")
    """Print one line of figures as JSON."""

    def convert(
        self, source: str, to: Literal["hf", "megatron"], config_from: Path | None
    ) -> None:
        """Convert the model that the user names `source`, and print the figures."""
        directory = find_source(source, to, self.out, overwrite=self.overwrite)
        from megatron_opsft.commands.convert.run import open_to_convert

        self.write(open_to_convert(directory, to, config_from), to)

    def write(self, source: "Source", to: Literal["hf", "megatron"]) -> None:
        """Write an opened model to --out, and print the figures."""
        from megatron_opsft.commands.convert.run import write_source

        figures = write_source(
            source,
            self.out,
            to,
            dtype=self.dtype,
            max_shard_bytes=self.shard_size,
            overwrite=self.overwrite,
            verify=self.verify,
        )
        if self.as_json:
            say(json.dumps(dataclasses.asdict(figures)))
        else:
            size = ByteSize(figures.bytes).human_readable(decimal=True)
            text = (
                f"wrote {self.out}: {figures.tensors} tensors, {size} in {figures.seconds:.1f} s, "
                f"peak memory {figures.peak_rss_mb:.0f} MiB"
            )
            if self.verify:
                text += ", verified"
            say(text)


class ToMegatron(_Conversion):
    """Hugging Face directory -> Megatron-Core distributed checkpoint (torch_dist).

    It loads at any TP x PP x VPP (x EP). The output appears when it is whole.
    """

    examples = (
        "convert to-megatron --hf DIR --out MEGATRON_DIR --verify",
        "convert to-megatron --hf DIR --out OTHER --dtype bfloat16",
    )
    hf: str
    """Hugging Face directory, hub name, run directory or tiny_reasoner."""

    def run(self) -> None:
        """Convert."""
        self.convert(self.hf, "megatron", None)


class ToHf(_Conversion):
    """Megatron-Core distributed checkpoint (torch_dist) -> Hugging Face directory.

    The checkpoint may be one of a training run, at any parallel layout. The output appears when it
    is whole.
    """

    examples = (
        "convert to-hf --megatron MEGATRON_DIR --out DIR",
        "convert to-hf --megatron MEGATRON_DIR --out NEW --verify",
    )
    megatron: Path
    """Megatron-Core distributed checkpoint, or a run: its newest one."""
    config_from: Path | None = None
    """Hugging Face directory or run with config and tokenizer, if --megatron has none."""

    def run(self) -> None:
        """Convert."""
        self.convert(str(self.megatron), "hf", self.config_from)


class Merge(_Conversion):
    """LoRA adapter of PEFT's and its base model -> Hugging Face directory of the merged model.

    The output appears when it is whole. A checkpoint of a run with LoRA is merged by `to-hf`.
    """

    words = ("adapter",)
    examples = (
        "convert merge ADAPTER_DIR --out NEW",
        "convert merge ADAPTER_DIR --base DIR --out NEW",
    )
    adapter: Path
    """Directory with adapter_config.json and adapter_model.safetensors."""
    base: str | None = None
    """The adapter's model; by default the one that adapter_config.json names."""

    def run(self) -> None:
        """Merge."""
        from megatron_opsft.commands.convert.run import open_merged

        self.write(open_merged(self.adapter, self.base), "hf")


class Check(Command):
    """Compare the weights of two models; exit code 4 when any differs."""

    words = ("first", "second")
    examples = (
        "convert check DIR MEGATRON_DIR",
        "convert check CHECKPOINT DIR --config-from DIR",
    )
    first: str
    """Either format."""
    second: str
    """Either format."""
    config_from: Path | None = None
    """Hugging Face directory or run with config and tokenizer, if --megatron has none."""

    def run(self) -> int | None:
        """Print one line for each tensor that differs. Returns the exit code."""
        from megatron_opsft.commands.convert.run import differing_tensors, open_source
        from megatron_opsft.models.storage.model_paths import resolve_model

        first, second = (
            open_source(resolve_model(name, option="convert check"), self.config_from)
            for name in (self.first, self.second)
        )
        lines = differing_tensors(first, second)
        num_tensors = len(first.shapes() | second.shapes())
        if not lines:
            say(f"equal: {num_tensors} tensors")
            return None
        lines.append(f"{len(lines)} of {num_tensors} tensors differ")
        say("\n".join(lines))
        return ANSWER_IS_NO


PROGRAM = group(
    "convert",
    "Convert checkpoints between Hugging Face and Megatron-Core.",
    {"to-megatron": ToMegatron, "to-hf": ToHf, "merge": Merge, "check": Check},
    (
        "convert to-megatron --hf DIR --out MEGATRON_DIR --verify",
        "convert to-hf --megatron MEGATRON_DIR --out DIR",
    ),
)


def find_source(name: str, to: str, out: Path, *, overwrite: bool) -> Path:
    """Return the directory of a model that is to be converted `to` hf or megatron.

    Errors: `UserError`, also for an output that may not be written.
    """
    from megatron_opsft.models.storage.model_paths import (
        check_holds_no_checkpoints,
        newest_checkpoint,
        resolve_model,
    )
    from megatron_opsft.models.storage.replacing import check_out

    if to == "megatron":
        directory = resolve_model(name, option="--hf")
    else:
        directory = newest_checkpoint(Path(name).expanduser())
        check_holds_no_checkpoints(directory, "--megatron")
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory")
    check_out(out, [directory], overwrite=overwrite)
    return directory
