"""`megatron-opsft engine`: a rollout engine on a node of its own, as users call it."""

from pathlib import Path
from typing import Annotated

import typer

from megatron_opsft.command_line import examples

EXAMPLES = examples(
    "megatron-opsft engine --listen node7:15100 --token-file ~/engine_token",
    "CUDA_VISIBLE_DEVICES=2,3 megatron-opsft engine --listen 10.0.0.7:15101",
)


def engine(
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help="One address of this machine, and a port that is free there."
        ),
    ],
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="The secret that it shares with the trainer, readable by you alone; by default "
            "MEGATRON_OPSFT_ENGINE_TOKEN.",
            show_default=False,
        ),
    ] = None,
    log_dir: Annotated[
        Path, typer.Option(help="Where engine-PORT.log goes, what the engine itself prints.")
    ] = Path(),
    idle_minutes: Annotated[
        float, typer.Option(min=0, help="It ends when no trainer has come for so long.")
    ] = 60.0,
) -> None:
    """Keep a rollout engine here for a trainer on another node (its rollout.engines).

    It serves one trainer at a time, which says what to load, and then waits for the next one.
    """
    from megatron_opsft.rollout.remote.addresses import parse_address
    from megatron_opsft.rollout.remote.host import EngineHost
    from megatron_opsft.rollout.remote.keys import read_token

    address = parse_address(listen, "--listen")
    host = EngineHost(address, read_token(token_file), log_dir, 60 * idle_minutes)
    typer.echo(f"an engine waits for its trainer at {address}")
    try:
        host.serve()
    except KeyboardInterrupt:
        typer.echo("interrupted")
    finally:
        host.close()
