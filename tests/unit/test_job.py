"""A job whose ranks do not all come: real processes, of which one is never started."""

import os
import socket
import subprocess
import sys
import time

import pytest

from megatron_opsft.errors import UserError
from megatron_opsft.runtime.job import is_launched

# Of three ranks, two come, or only one.
JOIN = """
import sys
from datetime import timedelta
import click
from megatron_opsft.cli import run
from megatron_opsft.runtime.device import select_device
from megatron_opsft.runtime.job import join_job

@click.command()
def join() -> None:
    device = select_device("cpu")
    print("starts", flush=True)
    sys.stdin.readline()  # loading takes the ranks differently long
    join_job(device, timedelta(hours=1), timedelta(seconds=3))

run(join)
"""


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ((0, 2), "rank 1 did not come within 0.05 min of the start"),
        ((1,), "rank 0 does not answer at localhost:{port} within 0.05 min of the start"),
    ],
)
def test_every_rank_that_came_says_who_did_not(ranks: tuple[int, ...], message: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    names = {"WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    came = [
        subprocess.Popen(
            [sys.executable, "-c", JOIN],
            env={**os.environ, **names, "RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ranks
    ]
    for process in came:
        assert process.stdout is not None and process.stdout.readline() == "starts\n"
    start = time.monotonic()
    for process in came:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process, rank in zip(came, ranks, strict=True):
        _, errors = process.communicate(timeout=50)
        assert process.returncode == 69, errors
        where = f"rank {rank} on {socket.gethostname()} in phase start"
        assert errors == f"error: {where}: {message.format(port=port)}\n"
    # Patience, hearing, letting rank 0 speak first; room.
    assert time.monotonic() - start < 3 + 1 + 3 + 4


def test_a_variable_that_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name in ("RANK", "MASTER_ADDR"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(UserError, match="has not set WORLD_SIZE, MASTER_PORT"):
        is_launched()
