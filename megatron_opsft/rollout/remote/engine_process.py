"""Starting the process of a separate engine (`process`), on this machine."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import zmq


class EngineProcess:
    """The process and the socket by which it is asked; its output is appended to a file."""

    def __init__(self, context: zmq.Context[Any], log_file: Path, devices: Sequence[int]) -> None:
        """devices: indices of the GPUs it may use; none on a CPU, and where it may use all."""
        self._log_file = log_file
        self._directory = tempfile.TemporaryDirectory(prefix="opsft-engine-")  # only ours to open
        address = f"ipc://{self._directory.name}/socket"
        self.socket: Any = context.socket(zmq.PAIR)
        self.socket.bind(address)
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with log_file.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megatron_opsft.rollout.remote", address],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(os.environ, devices),
                start_new_session=True,  # Ctrl-C is for the trainer, which saves first
            )

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def can_send(self, milliseconds: int) -> bool:
        """Whether the process is there to be told something; waits for at most so long."""
        return bool(self.socket.poll(milliseconds, zmq.POLLOUT))

    def send(self, content: bytes) -> None:
        """When `can_send`."""
        self.socket.send(content, zmq.NOBLOCK)

    def poll(self, milliseconds: int) -> bool:
        """Whether something has come from it; waits for at most so long."""
        return bool(self.socket.poll(milliseconds))

    def receive(self) -> bytes:
        """What has come first."""
        return self.socket.recv()

    def ended(self) -> str:
        """How it ended; "" while it is there."""
        code = self._process.poll()
        return "" if code is None else f"ended with code {code}"

    def last_words(self) -> str:
        """The file that it writes, and what that ends with."""
        text = ""
        if self._log_file.exists():
            text = self._log_file.read_text(encoding="utf-8", errors="replace")
        last = next((line for line in reversed(text.split("\n")) if line.strip()), "nothing")
        return f"{self._log_file} ends with: {last[:300]}"

    def close(self) -> None:
        """End it, however busy it is, and remove its socket."""
        self._process.kill()
        self._process.wait()
        self.socket.close(linger=0)
        self._directory.cleanup()


def _environment(given: Mapping[str, str], devices: Sequence[int]) -> dict[str, str]:
    """The trainer's, without what its launcher set: the engine is a job of its own."""
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    mine = {
        name: value
        for name, value in given.items()
        if name not in (*launcher, "MASTER_PORT") and not name.startswith("TORCHELASTIC_")
    }
    if devices:
        visible = mine.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else None
        mine["CUDA_VISIBLE_DEVICES"] = ",".join(names[d] if names else str(d) for d in devices)
    return mine
