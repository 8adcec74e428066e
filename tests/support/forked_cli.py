"""Runs of the command line, each in a process of its own, without paying for the imports each time.

A server process imports the trainer once and forks for each run. The runs are complete: their own
process, output and exit code. The server is this file as a script; requests and answers are JSON
lines on its standard input and output.
"""

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """How a run ended; a negative exit code is the number of the signal that ended it."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def error(self) -> str:
        """The one error line of bad input."""
        assert self.exit_code == 2 and "Traceback" not in self.stderr, self.stderr
        (line,) = [line for line in self.stderr.splitlines() if line.startswith("error: ")]
        return line


class Run:
    """A run that was started."""

    def __init__(self, server: "ForkedCli", pid: int, directory: Path) -> None:
        self.pid = pid
        self._server = server
        self._directory = directory
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        if self._code is None:
            self._code = self._server.ask(wait=self.pid, timeout=None)["exit_code"]
        return self._code

    @property
    def stderr(self) -> str:
        """What it has written there so far."""
        return (self._directory / "stderr").read_text(encoding="utf-8", errors="replace")

    def wait(self, timeout: float = 300) -> Finished:
        """Its end. Errors: AssertionError after `timeout` seconds; the run is killed then."""
        code = self.poll()
        if code is None:
            code = self._server.ask(wait=self.pid, timeout=timeout)["exit_code"]
        out, err = (
            (self._directory / name).read_text(encoding="utf-8", errors="replace")
            for name in ("stdout", "stderr")
        )
        assert code is not None, f"still running after {timeout} s:\n{out}\n{err}"
        return Finished(exit_code=code, stdout=out, stderr=err)


class ForkedCli:
    """The server, seen from a test."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._num_runs = 0
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def start(self, argv: Sequence[object], prelude: str = "") -> Run:
        """`megatron-opsft *argv`; prelude: Python that the process executes first."""
        self._num_runs += 1
        directory = self._directory / f"run{self._num_runs}"
        directory.mkdir(parents=True)
        for name in ("stdout", "stderr"):  # there even if the run is killed before it opens them
            (directory / name).touch()
        words = [str(word) for word in argv]
        answer = self.ask(argv=words, prelude=prelude, directory=str(directory))
        return Run(self, answer["pid"], directory)

    def run(self, argv: Sequence[object], prelude: str = "") -> Finished:
        """`start` and `wait`."""
        return self.start(argv, prelude).wait()

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _serve() -> None:
    sys.path.insert(0, str(ROOT))
    from megatron_opsft.runtime.libraries import loading_libraries

    with loading_libraries():
        import pandas  # noqa: F401  # pyarrow does, when it first sees a list
        from transformers import Qwen2ForCausalLM  # noqa: F401

        import megatron_opsft.evaluate.run
        import megatron_opsft.report.page
        import megatron_opsft.train  # noqa: F401

    gc.freeze()  # no run's collections look at what is imported
    for line in sys.stdin:
        request = json.loads(line)
        if "argv" in request:
            answer: Mapping[str, int | None] = {"pid": _fork(request)}
        else:
            answer = {"exit_code": _wait(request["wait"], request["timeout"])}
        print(json.dumps(answer), flush=True)


def _fork(request: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(f"{request['directory']}/{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = ["megatron-opsft", *request["argv"]]
    code = 1
    try:
        exec(request["prelude"], {})
        from megatron_opsft.cli import main

        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(pid: int, timeout: float | None) -> int | None:
    """The exit code; without a timeout None while it runs."""
    if timeout is None:
        done, status = os.waitpid(pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if done else None
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return None


if __name__ == "__main__":
    _serve()
