"""Judges of a user's own. Their module is imported by every verifier process: it must be light."""

import math
import os
import signal
import sys
import time
import zlib
from types import SimpleNamespace
from typing import Any

from megatron_opsft.data import answers
from megatron_opsft.records import Outcome, Verdict

KEPT: list[bytearray] = []  # as sympy keeps what it has computed


def last_box(text: str, gold: str, fields: dict[str, Any]) -> Verdict:
    """Of answers that are spelled in one way; sympy takes half as long to start as a small run."""
    box = answers.last_box(text)
    if box is None or not box.content:
        return Verdict(outcome=Outcome.NO_ANSWER)
    outcome = Outcome.CORRECT if box.content == gold else Outcome.WRONG
    return Verdict(outcome=outcome, answer=box.content)


def half_of_them(text: str, gold: str, fields: dict[str, Any]) -> bool:
    """Passes half of what a model that knows nothing answers: the same for the same text."""
    return zlib.crc32(text.encode()) % 2 == 0


def all_of_them(text: str, gold: str, fields: dict[str, Any]) -> bool:
    """Passes everything: no response of a group is better than another."""
    return True


def any_return(text: str, gold: str, fields: dict[str, Any]) -> Any:
    """What a user may return, by the text."""
    if text == "raise":
        raise KeyError("no such column")
    returned = {"true": True, "0.0": 0.0, "1.0": 1.0, "outcome": Outcome.NO_ANSWER, "none": None}
    returned |= {"nan": math.nan, "inf": math.inf}
    returned["numpy"] = SimpleNamespace(item=lambda: True)  # as its scalars are
    returned["half"] = Verdict(outcome=Outcome.CORRECT, answer="\ud83d")
    return returned.get(text, fields == {"answer": "x"})


def judge_or_misbehave(text: str, gold: str, fields: dict[str, Any]) -> Verdict:
    """A judge that does what the text says, as broken answers do to a real one."""
    if text == "hang":
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        pow(3, pow(3, 21))  # minutes in one C call: no signal handler runs
    if text == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if text == "exit":
        sys.exit(3)
    if text == "fork" and os.fork() == 0:
        time.sleep(0.1)  # a copy that answers later, to the next request
    if text == "print":
        print("stray output")
        os.write(1, b"more of it")
    if text.startswith("keep"):
        KEPT.append(bytearray(int(text.split()[1]) * 2**20))
    if text.startswith("sleep"):
        time.sleep(float(text.split()[1]))
    outcome = Outcome.CORRECT if text == gold else Outcome.WRONG
    return Verdict(outcome=outcome, answer=f"{text} {os.getpid()}")


def nan(text: str, gold: str, fields: dict[str, Any]) -> float:
    """Judges nothing, as one that divides by what is not there."""
    return math.nan


def only_late(text: str, gold: str, fields: dict[str, Any]) -> None:
    """Takes longer than anybody waits."""
    time.sleep(60)
