"""The page of what goes on: written again whenever its directories have changed, until they end."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_opsft.report.page.parts import Parts, is_study, members_of, parts_of

# A run touches its lock every 10 s; other work may be longer without a file that changes.
SILENT_SECONDS = {"run": 120.0, "study": 1800.0}
_LOCK = ".run_lock"
_RUN_FILES = ("config.yaml", "manifest.json", "metrics.jsonl", "evals.jsonl", "summary.json")
_FOLDERS = ("rollouts", "samples")  # a new file changes the folder's own time
_Stamps = list[tuple[str, int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What is on disk at one moment. stamps: names, times and sizes of what the page is made of;
    lives: the same of what only says that somebody is at work.
    """

    parts: Parts
    stamps: _Stamps
    lives: _Stamps
    is_finished: bool


def watch(
    paths: Sequence[Path],
    seconds: float,
    write: Callable[[Parts], object],
    *,
    silent_seconds: float | None = None,
    sleep: Callable[[float], object] = time.sleep,
) -> str:
    """Call `write` now and whenever something has changed, at most every so many seconds and for
    no more than half of the time. Returns why it is over: all has finished, or nothing gives a sign
    of life. silent_seconds: how long that takes.
    """
    if silent_seconds is None:
        kinds = ["study" if is_study(path) else "run" for path in paths]
        silent_seconds = max(SILENT_SECONDS[kind] for kind in kinds)
    written: _Stamps | None = None
    alive: tuple[_Stamps, _Stamps] | None = None
    last_sign = time.monotonic()
    while True:
        now = look(paths)
        if (now.stamps, now.lives) != alive:
            alive, last_sign = (now.stamps, now.lives), time.monotonic()
        took = 0.0
        if now.is_finished:
            return "finished"
        if now.stamps != written:
            started = time.monotonic()
            write(now.parts)
            took = time.monotonic() - started
            written = now.stamps
        if time.monotonic() - last_sign > silent_seconds:
            return f"not finished, but nothing has changed for {silent_seconds:.0f} s"
        sleep(max(seconds, took))


def look(paths: Sequence[Path]) -> Look:
    """Reads no file."""
    parts = parts_of(paths)
    files = [*_shown_files(parts)]
    members = [member for path in paths for member in members_of(path)]
    signs = [run / _LOCK for run in parts.runs] + [member / "log.txt" for member in members]
    ends = [run / "summary.json" for run in parts.runs] + [
        member / "eval/results.json" for member in members
    ]
    is_finished = all(end.is_file() for end in ends)
    stamps = _stamps(files)
    # Runs of a study begin one after another: it is over when its table is younger than them all.
    for study in filter(is_study, paths):
        table = _stamps([study / "table.json"])
        newest = max((when for _, when, _ in stamps), default=0)
        is_finished = is_finished and bool(table) and table[0][1] >= newest
    return Look(parts=parts, stamps=stamps, lives=_stamps(signs), is_finished=is_finished)


def _shown_files(parts: Parts) -> Iterator[Path]:
    for run in parts.runs:
        yield from (run / name for name in (*_RUN_FILES, *_FOLDERS))
        yield from sorted(run.glob("failed_step_*.json"))
    for directory in parts.evaluations:
        yield from (directory / name for name in ("results.json", *_FOLDERS))


def _stamps(paths: Sequence[Path]) -> _Stamps:
    """(name, time of the last change in ns, bytes) of those that are there."""
    found = []
    for path in paths:
        try:
            status = path.stat()
        except OSError:
            continue
        found.append((str(path), status.st_mtime_ns, status.st_size))
    return found
