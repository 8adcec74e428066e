"""`megatron-opsft data`: the command, as users call it."""

from pathlib import Path
from typing import Annotated

import typer

from megatron_opsft.command_line import ConfigPath, Overrides, examples

EXAMPLES = examples(
    "megatron-opsft data crst examples/configs/quickstart.yaml --out crst.parquet",
    "megatron-opsft data tokenskip CONFIG method.ratio=0.7 --limit 9 --out FILE",
)


def data(
    method: Annotated[str, typer.Argument(help="A method that trains on fixed data.")],
    config: ConfigPath,
    out: Annotated[Path, typer.Option(help="Parquet file to write.")],
    overrides: Overrides = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="How many problems at most.", show_default=False)
    ] = None,
) -> None:
    """Sample and choose the responses that a method trains on as data.responses."""
    from megatron_opsft.config_file import load_config
    from megatron_opsft.make_data.check import check_data

    loaded = load_config(config, [f"method.name={method}", *(overrides or [])])
    check_data(loaded, out)
    from megatron_opsft.make_data.run import make_data

    make_data(loaded, out, limit)
