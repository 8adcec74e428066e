"""A trainer rank's end of a separate engine: starts the process, asks it, and sees it die."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq

from megatron_opsft.errors import EngineDied, UserError
from megatron_opsft.rollout.remote.messages import Kind, Reply, Request

_POLL_MS = 20
_START_SECONDS = 1800.0


class EngineClient:
    """One engine process; `EngineDied` from any call means that a new client is needed."""

    def __init__(self, log_file: Path, devices: Sequence[int], timeout_seconds: float) -> None:
        """Starts the process; its output is appended to `log_file`.

        devices: indices of the GPUs it may use; none on a CPU.
        timeout_seconds: without a word for so long while it should answer, it is hung.
        """
        self._log_file = log_file
        self._timeout = timeout_seconds
        self._directory = tempfile.TemporaryDirectory(prefix="opsft-engine-")  # only ours to open
        address = f"ipc://{self._directory.name}/socket"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.bind(address)
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with log_file.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megatron_opsft.rollout.remote.process", address],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(devices),
                start_new_session=True,  # Ctrl-C is for the trainer, which saves first
            )

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._process.pid

    def start(self, *arguments: Any) -> Any:
        """`call("start", ...)`, which takes the time to load libraries and to build the engine."""
        timeout = max(_START_SECONDS, self._timeout)
        self._send(Request("start", arguments), timeout)
        self._directory.cleanup()  # both are connected: nothing is left behind, whatever happens
        return self._receive(timeout)

    def call(self, method: str, *arguments: Any) -> Any:
        """The result of a method of `process.Service`.

        Errors: `EngineDied`; `UserError` where starting again would not help.
        """
        self.send(method, *arguments)
        return self.receive()

    def send(self, method: str, *arguments: Any) -> None:
        """Ask without waiting for the result; `receive` must follow, once for each request."""
        self._send(Request(method, arguments), self._timeout)

    def receive(self) -> Any:
        """The result of the oldest request that has none yet."""
        return self._receive(self._timeout)

    def _send(self, request: Request, timeout: float) -> None:
        self._wait(zmq.POLLOUT, timeout)
        self._socket.send_pyobj(request, zmq.NOBLOCK)

    def _receive(self, timeout: float) -> Any:
        while True:
            self._wait(zmq.POLLIN, timeout)
            reply: Reply = self._socket.recv_pyobj()
            if reply.kind is Kind.RESULT:
                return reply.value
            if reply.kind is Kind.ERROR:
                raise UserError(reply.value)

    def _wait(self, event: int, timeout: float) -> None:
        """Until the socket can be written (it has a peer) or read; `EngineDied` if it never can."""
        deadline = time.monotonic() + timeout
        while not self._socket.poll(_POLL_MS, event):
            if self._process.poll() is not None:
                raise self._died(f"ended with code {self._process.returncode}")
            if time.monotonic() > deadline:
                raise self._died(f"was silent for {timeout:.0f} s")

    def close(self) -> None:
        """End the process, however busy it is, and remove its socket."""
        self._process.kill()
        self._process.wait()
        self._socket.close(linger=0)
        self._context.term()
        self._directory.cleanup()

    def _died(self, how: str) -> EngineDied:
        text = ""
        if self._log_file.exists():
            text = self._log_file.read_text(encoding="utf-8", errors="replace")
        last = next((line for line in reversed(text.split("\n")) if line.strip()), "nothing")
        return EngineDied(
            f"rollout engine (process {self.pid}) {how}; {self._log_file} ends with: {last[:300]}"
        )


def _environment(devices: Sequence[int]) -> dict[str, str]:
    """The trainer's, without what its launcher set: the engine is a job of its own."""
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    mine = {
        name: value
        for name, value in os.environ.items()
        if name not in (*launcher, "MASTER_PORT") and not name.startswith("TORCHELASTIC_")
    }
    if devices:
        visible = mine.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else None
        mine["CUDA_VISIBLE_DEVICES"] = ",".join(names[d] if names else str(d) for d in devices)
    return mine
