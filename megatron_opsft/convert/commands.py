"""`megatron-opsft convert`: the commands, as users call them."""

import dataclasses
import json
import re
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Literal

import typer

from megatron_opsft.command_line import examples
from megatron_opsft.errors import ANSWER_IS_NO, UserError
from megatron_opsft.runtime.printable import printable

app = typer.Typer(
    help="Convert checkpoints between Hugging Face and Megatron-Core.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog=examples(
        "megatron-opsft convert to-megatron --hf DIR --out MEGATRON_DIR --verify",
        "megatron-opsft convert to-hf --megatron MEGATRON_DIR --out DIR",
    ),
)


class DtypeName(StrEnum):
    """Values of --dtype."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


Dtype = Annotated[DtypeName | None, typer.Option(help="Cast to it; by default as in the source.")]
ShardSize = Annotated[str, typer.Option(help="Largest file, such as 5GB or 500MB.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the model or conversion at --out.")
]
Verify = Annotated[
    bool,
    typer.Option("--verify", help="Read everything back and compare hashes, tensor by tensor."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one line of figures as JSON.")]
Workers = Annotated[int, typer.Option(min=1, help="Threads that copy.")]
ConfigFrom = Annotated[
    Path | None,
    typer.Option(
        help="Hugging Face directory or run with config and tokenizer, if --megatron has none."
    ),
]


@app.command(
    name="to-megatron",
    epilog=examples(
        "megatron-opsft convert to-megatron --hf DIR --out MEGATRON_DIR --verify",
        "megatron-opsft convert to-megatron --hf DIR --out OTHER --dtype bfloat16",
    ),
)
def to_megatron(
    hf: Annotated[
        str, typer.Option(help="Hugging Face directory, hub name, run directory or tiny_reasoner.")
    ],
    out: Annotated[Path, typer.Option(help="Directory to write.")],
    dtype: Dtype = None,
    shard_size: ShardSize = "5GB",
    overwrite: Overwrite = False,
    verify: Verify = False,
    as_json: Json = False,
    workers: Workers = 1,
) -> None:
    """Hugging Face directory -> Megatron-Core distributed checkpoint (torch_dist).

    It loads at any TP x PP x VPP (x EP). The output appears when it is whole.
    """
    from megatron_opsft.convert.paths import find_source

    model = find_source(hf, "megatron")
    _convert(model, None, out, "megatron", dtype, shard_size, overwrite, verify, as_json, workers)


@app.command(
    name="to-hf",
    epilog=examples(
        "megatron-opsft convert to-hf --megatron MEGATRON_DIR --out DIR",
        "megatron-opsft convert to-hf --megatron MEGATRON_DIR --out NEW --verify",
    ),
)
def to_hf(
    megatron: Annotated[
        Path,
        typer.Option(help="Megatron-Core distributed checkpoint, or a run: its newest one."),
    ],
    out: Annotated[Path, typer.Option(help="Directory to write.")],
    config_from: ConfigFrom = None,
    dtype: Dtype = None,
    shard_size: ShardSize = "5GB",
    overwrite: Overwrite = False,
    verify: Verify = False,
    as_json: Json = False,
    workers: Workers = 1,
) -> None:
    """Megatron-Core distributed checkpoint (torch_dist) -> Hugging Face directory.

    The checkpoint may be one of a training run, at any parallel layout. The output appears when it
    is whole.
    """
    from megatron_opsft.convert.paths import find_source

    checkpoint = find_source(str(megatron), "hf")
    _convert(
        checkpoint, config_from, out, "hf", dtype, shard_size, overwrite, verify, as_json, workers
    )


@app.command(
    epilog=examples(
        "megatron-opsft convert check DIR MEGATRON_DIR",
        "megatron-opsft convert check CHECKPOINT DIR --config-from DIR",
    )
)
def check(
    first: Annotated[str, typer.Argument(help="Either format.")],
    second: Annotated[str, typer.Argument(help="Either format.")],
    config_from: ConfigFrom = None,
    workers: Workers = 1,
) -> None:
    """Compare the weights of two models; exit code 4 when any differs."""
    from megatron_opsft.convert.compare import differing_tensors

    sources = [_open(_directory_of(name), config_from) for name in (first, second)]
    if lines := differing_tensors(sources[0], sources[1], workers=workers):
        typer.echo(printable("\n".join(lines)))
        raise typer.Exit(ANSWER_IS_NO)
    typer.echo(f"equal: {len(sources[0].table.hf_shapes())} tensors")


def _convert(
    directory: Path,
    config_from: Path | None,
    out: Path,
    to: Literal["hf", "megatron"],
    dtype: DtypeName | None,
    shard_size: str,
    overwrite: bool,
    verify: bool,
    as_json: bool,
    workers: int,
) -> None:
    from megatron_opsft.convert.paths import check_paths

    check_paths(directory, out, overwrite=overwrite)
    from megatron_opsft.convert.progress import in_words
    from megatron_opsft.convert.run import convert_model

    figures = convert_model(
        directory,
        out,
        to,
        config_from=config_from,
        dtype=dtype.value if dtype else None,
        max_shard_bytes=parse_size(shard_size),
        overwrite=overwrite,
        verify=verify,
        workers=workers,
    )
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(figures)))
    elif figures.already_complete:
        typer.echo(f"{out} is already the result of this conversion")
    else:
        checked = ", verified" if verify else ""
        typer.echo(
            f"wrote {out}: {figures.tensors} tensors, {in_words(figures.bytes)} in "
            f"{figures.seconds:.1f} s, peak memory {figures.peak_rss_mb:.0f} MiB{checked}"
        )


def _directory_of(name: str) -> Path:
    """A checkpoint, or what `resolve_model` makes of the name. Errors: `UserError`."""
    from megatron_opsft.storage.known_files import is_dist_checkpoint
    from megatron_opsft.storage.model_paths import resolve_model

    path = Path(name)
    return path if is_dist_checkpoint(path) else resolve_model(name, option="convert check")


def _open(directory: Path, config_from: Path | None):  # type: ignore[no-untyped-def]
    from megatron_opsft.convert.source import open_source

    return open_source(directory, config_from)


def parse_size(text: str) -> int:
    """Bytes of `5GB`, `500MB` or a plain number, at most 2**63 - 1. Errors: `UserError`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.strip(), re.IGNORECASE)
    size = Fraction(match[1]) * 1000 ** " KMGT".index(match[2].upper() or " ") if match else 0
    if not 1 <= size < 2**63:
        shown = text if len(text) <= 40 else f"{text[:40]}..."
        raise UserError(f"--shard-size={shown} is no size of a file; write for example 5GB")
    return int(size)
