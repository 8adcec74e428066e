"""Engines on other nodes: addresses, the job's token, and who is let in."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from engine_processes import engine_processes

from megatron_opsft.errors import EngineDied, UserError
from megatron_opsft.rollout.remote import hosted
from megatron_opsft.rollout.remote.addresses import Address, parse_address
from megatron_opsft.rollout.remote.host import EngineHost
from megatron_opsft.rollout.remote.hosted import HostedEngine
from megatron_opsft.rollout.remote.keys import (
    TOKEN_VARIABLE,
    KeyPair,
    Keys,
    derive_keys,
    read_token,
)

TOKEN, OTHER = "t" * 40, "o" * 40


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("node7:15100", "node7", 15100),
        ("10.0.0.7:1", "10.0.0.7", 1),
        ("[fd00::7]:80", "fd00::7", 80),
    ],
)
def test_addresses(text: str, host: str, port: int) -> None:
    assert parse_address(text, "rollout.engines") == Address(host, port)
    assert str(Address(host, port)) == text


@pytest.mark.parametrize(
    "text",
    ["node7", "node7:", ":15100", "node7:0", "node7:70000", "fd00::7:80", "http://a:1", "a b:1"],
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(UserError, match=r"^rollout\.engines=.*: write HOST:PORT"):
        parse_address(text, "rollout.engines")


@pytest.mark.parametrize("text", ["0.0.0.0:15100", "[::]:15100", "*:15100"])
def test_all_interfaces_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="name one address of the machine"):
        parse_address(text, "--listen")


def test_tokens(tmp_path: Path) -> None:
    file = tmp_path / "token"
    with pytest.raises(UserError, match="cannot be read"):
        read_token(file)
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o640)
    with pytest.raises(UserError, match="others can read the token in .*: chmod 600"):
        read_token(file)
    file.chmod(0o600)
    assert read_token(file) == TOKEN
    assert read_token(None, {TOKEN_VARIABLE: TOKEN}) == TOKEN
    with pytest.raises(UserError, match="need the job's token: set rollout.engine_token_file"):
        read_token(None, {})
    with pytest.raises(UserError, match="has 5 characters, and could be guessed"):
        read_token(None, {TOKEN_VARIABLE: "short"})


def test_keys_follow_from_the_token_alone() -> None:
    assert derive_keys(TOKEN) == derive_keys(TOKEN)
    mine, other = derive_keys(TOKEN), derive_keys(OTHER)
    secrets = {mine.host.secret, mine.trainer.secret, other.host.secret, other.trainer.secret}
    assert len(secrets) == 4


@pytest.fixture
def address(tmp_path: Path) -> Iterator[Address]:
    """Of a host that serves until the test is over."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        found = Address("127.0.0.1", probe.getsockname()[1])
    host = EngineHost(found, TOKEN, tmp_path, idle_seconds=0.2)
    is_over = threading.Event()

    def serve() -> None:
        while not is_over.is_set():
            host.serve()
        host.close()

    thread = threading.Thread(target=serve)
    thread.start()
    yield found
    is_over.set()
    thread.join()


@pytest.fixture
def context() -> Iterator[Any]:
    with zmq.Context() as context:
        yield context


def processes() -> list[int]:
    """Engine processes of this one."""
    return [process.pid for process in engine_processes()]


def test_a_trainer_with_the_token_gets_a_process_that_ends_with_it(
    address: Address, context: Any
) -> None:
    engine = HostedEngine(context, address, TOKEN, 10)
    assert processes() == [engine.pid]
    with pytest.raises(UserError, match="is in use by another trainer"):
        HostedEngine(context, address, TOKEN, 10)
    engine.close()
    wait_until(lambda: not processes())
    lost = HostedEngine(context, address, TOKEN, 10)
    assert processes() == [lost.pid]
    lost._socket.close(linger=0)  # as when its node is gone
    wait_until(lambda: not processes())
    lost._monitor.close(linger=0)


def test_a_process_that_dies_is_reported(address: Address, context: Any) -> None:
    engine = HostedEngine(context, address, TOKEN, 10)
    os.kill(engine.pid, 9)
    wait_until(lambda: bool(engine.ended()))
    assert engine.ended().startswith("ended with code -9; ")
    engine.close()


def test_another_token_is_refused(address: Address, context: Any) -> None:
    with pytest.raises(UserError, match=rf"{address} refuses this run's token; start both with"):
        HostedEngine(context, address, OTHER, 10)
    assert processes() == []


def test_knowing_the_host_s_key_is_not_enough(
    address: Address, context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    public, secret = zmq.curve_keypair()
    host = derive_keys(TOKEN).host
    stranger = Keys(host=host, trainer=KeyPair(public=public, secret=secret))
    monkeypatch.setattr(hosted, "derive_keys", lambda token: stranger)
    with pytest.raises(UserError, match="refuses this run's token"):
        HostedEngine(context, address, TOKEN, 10)
    assert processes() == []


def test_without_keys_and_with_garbage_nothing_is_heard(address: Address, context: Any) -> None:
    plain = context.socket(zmq.DEALER)
    plain.connect(f"tcp://{address}")
    plain.send_multipart([b"open", b""])
    assert not plain.poll(500)
    plain.close(linger=0)
    with socket.create_connection((address.host, address.port)) as raw:
        raw.sendall(os.urandom(10_000))
    assert processes() == []
    HostedEngine(context, address, TOKEN, 10).close()  # and the host is still there


def test_nobody_answers(context: Any) -> None:
    with pytest.raises(EngineDied, match=r"nobody answers at 127\.0\.0\.1:9 after 0 s; start"):
        HostedEngine(context, Address("127.0.0.1", 9), TOKEN, 0.1)


def test_a_taken_port_is_named(address: Address, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"cannot listen at {address}: Address already in use"):
        EngineHost(address, TOKEN, tmp_path, idle_seconds=1)


def wait_until(condition: Any, timeout: float = 20) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
