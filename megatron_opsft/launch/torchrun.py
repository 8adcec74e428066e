"""Ranks on this machine, through torchrun inside this process.

torchrun's own restarts are off: it would start again what stopped as asked (75) and what can only
fail again. And it is kept from SIGTERM: it would end the ranks after 30 s, perhaps amid a step. The
ranks get the signal instead, checkpoint after their step, and leave with 75.
"""

import logging
import os
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, Self

import psutil
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from megatron_opsft.runtime.phase import (
    AT_ONCE_EXIT_CODE,
    REQUEUE_EXIT_CODE,
    STOP_SIGNALS,
    heard_signals,
    say_stopping,
)

_SECONDS_BETWEEN_LOOKS = 0.05


class Torchrun:
    """Starts `num_ranks` ranks and passes stop signals on to them.

    A context: before and after, signals mean what they meant. A second Ctrl-C ends everything at
    once.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._stopping = False
        self._ended = threading.Event()
        self._handlers: dict[signal.Signals, Any] = {}

    def run(self, arguments: Sequence[str]) -> int:
        """`megatron-opsft *arguments` on every rank; the exit code of the first that failed, or 0.

        128 + n: killed by signal n. 75 also if a rank was stopped before it listened to signals.
        """
        if self._stopping:
            return REQUEUE_EXIT_CODE
        options = torchrun.parse_args(
            [
                "--standalone",
                "--local-addr=localhost",  # the machine's own name need not resolve
                f"--nproc-per-node={self._num_ranks}",
                "--max-restarts=0",
                "--signals-to-handle=SIGQUIT",
                *["-m", "megatron_opsft", *arguments],
            ]
        )
        try:
            torchrun.run(options)
        except ChildFailedError as error:
            code = error.get_first_failure()[1].exitcode
            if self._stopping and (-code in STOP_SIGNALS or code - 128 in STOP_SIGNALS):
                return REQUEUE_EXIT_CODE
            return code if code >= 0 else 128 - code
        return 0

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if self._stopping and number == signal.SIGINT:
            for rank in psutil.Process().children():
                with suppress(psutil.NoSuchProcess):
                    rank.kill()
            os._exit(AT_ONCE_EXIT_CODE)
        if number == signal.SIGINT:
            say_stopping(number)
        if not self._stopping:
            self._stopping = True
            threading.Thread(target=self._stop_ranks, daemon=True).start()

    def _stop_ranks(self) -> None:
        """Also those that are only now being started, until the context ends.

        Ranks lead sessions of their own: a terminal's Ctrl-C does not reach them by itself.
        """
        stopped: set[psutil.Process] = set()
        while not self._ended.wait(_SECONDS_BETWEEN_LOOKS):
            for rank in set(psutil.Process().children()) - stopped:
                with suppress(psutil.NoSuchProcess):
                    rank.send_signal(signal.SIGTERM)
                stopped.add(rank)

    def __enter__(self) -> Self:
        # What it says about ranks that end with 75 would read like a failure.
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        self._handlers = {s: signal.signal(s, self._pass_on) for s in heard_signals()}
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
