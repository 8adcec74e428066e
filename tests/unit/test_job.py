"""A job whose ranks do not all come: real processes, of which one is never started."""

import socket
import time

import pytest
from forked_cli import ForkedCli

from megatron_opsft.errors import UserError
from megatron_opsft.runtime.job import is_launched

# Of three ranks, two come, or only one.
JOIN = """
import os
from datetime import timedelta
import click
from megatron_opsft.cli import run
from megatron_opsft.runtime.device import select_device
from megatron_opsft.runtime.job import join_job

os.environ.update(RANK="{rank}", WORLD_SIZE="3", MASTER_ADDR="localhost", MASTER_PORT="{port}")
join = lambda: join_job(select_device("cpu"), timedelta(hours=1), timedelta(seconds=3))
run(click.Command("join", callback=join))
"""


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ((0, 2), "rank 1 did not join within 0.05 min of the start"),
        ((1,), "rank 0 does not answer at localhost:{port} within 0.05 min of the start"),
    ],
)
def test_every_rank_that_came_says_who_did_not(
    cli: ForkedCli, ranks: tuple[int, ...], message: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    came = [cli.start([], prelude=JOIN.format(rank=rank, port=port)) for rank in ranks]
    start = time.monotonic()
    for run, rank in zip(came, ranks, strict=True):
        ended = run.wait(50)
        where = f"rank {rank} on {socket.gethostname()} in phase start"
        assert ended.stderr == f"error: {where}: {message.format(port=port)}\n"
        assert ended.exit_code == 69
    # Patience, hearing, letting rank 0 speak first; room.
    assert time.monotonic() - start < 3 + 1 + 3 + 4


def test_a_variable_that_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name in ("RANK", "MASTER_ADDR"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(UserError, match="has not set WORLD_SIZE, MASTER_PORT"):
        is_launched()
