"""`megatron-opsft diagnose`: the command, as users call it."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from megatron_opsft.command_line import examples
from megatron_opsft.errors import UserError
from megatron_opsft.evaluate.commands import files_of
from megatron_opsft.runtime.loading import loading_libraries
from megatron_opsft.runtime.printable import printable

EXAMPLES = examples(
    "megatron-opsft diagnose --original tiny_reasoner --efficient RUN --out DIR",
    "megatron-opsft diagnose --original A --efficient B --out D --data mine=FILE",
    "megatron-opsft diagnose --original A --efficient B --out D --responses EVAL",
)


class DtypeName(StrEnum):
    """Values of --dtype."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class DeviceName(StrEnum):
    """Values of --device."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


def diagnose(
    original: Annotated[str, typer.Option(help="Model whose responses are diagnosed.")],
    efficient: Annotated[str, typer.Option(help="Model trained from it.")],
    out: Annotated[Path, typer.Option(help="Directory to write.")],
    responses: Annotated[
        Path | None,
        typer.Option(help="Evaluation or run with the original's responses.", show_default=False),
    ] = None,
    data: Annotated[
        list[str] | None, typer.Option(help="BENCHMARK=FILE; may be repeated.", show_default=False)
    ] = None,
    benchmarks: Annotated[
        str, typer.Option(help="Such as gsm8k,math500.", show_default=False)
    ] = "",
    samples: Annotated[int, typer.Option(min=1, help="Responses to a problem.")] = 1,
    limit: Annotated[int, typer.Option(min=1, help="Problems of a benchmark, at most.")] = 32,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of a sampled response.", show_default=False)
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="Ranks that share both models.")] = 1,
    dtype: Annotated[DtypeName, typer.Option(help="Of both models.")] = DtypeName.AUTO,
    device: Annotated[DeviceName, typer.Option(help="Where.")] = DeviceName.AUTO,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete the diagnosis that --out holds.")
    ] = False,
) -> None:
    """Compare two models at every token of the original's responses: D_t, the divergence of their
    next-token distributions; where and at which words it is large.

    The same command continues what is in --out. Without --responses the original samples.
    """
    from megatron_opsft.diagnose.directory import check_out
    from megatron_opsft.diagnose.responses import check_source
    from megatron_opsft.diagnose.settings import DiagnoseSettings
    from megatron_opsft.storage.model_paths import local_model

    for option, name in (("--original", original), ("--efficient", efficient)):
        local_model(name, option=option)
    if responses is not None:
        check_source(responses)
        if benchmarks:
            raise UserError("--responses and --benchmarks exclude each other; give one of them")
    check_out(out, overwrite=False)
    settings = DiagnoseSettings(
        original=original,
        efficient=efficient,
        out=out,
        responses=responses,
        benchmarks=tuple(name.strip() for name in benchmarks.split(",") if name.strip()),
        data=files_of(data or []),
        samples=samples,
        limit=limit,
        max_tokens=max_tokens,
        tp=tp,
        dtype=dtype.value,
        device=device.value,
    )
    with loading_libraries():
        from megatron_opsft.diagnose.run import diagnose as run

    if table := run(settings, overwrite=overwrite):
        typer.echo(printable(table), nl=False)
        typer.echo(f"every token, summary and pictures: {out}")
