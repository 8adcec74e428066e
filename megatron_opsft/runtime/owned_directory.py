"""A directory that one command writes: that of a run, an evaluation, a diagnosis, a study's run.

One process has it at a time, on shared file systems too; the same command continues what is in it;
and what others put there is neither taken for the command's own nor deleted.

The lock is filelock's lease: a file that only one process can create, with its host and process,
which its owner touches now and then. On the owner's machine the process table says whether the
owner lives; from any other machine only time does: a lock that nobody touches for `SILENT_SECONDS`
is taken over. No clocks are compared, and no lock service of the file system is needed.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from filelock import LeaseCompromise, SoftFileLease, Timeout

from megatron_opsft.errors import UserError
from megatron_opsft.runtime.console import say
from megatron_opsft.runtime.durable import remove, write_json

LOCK = ".run_lock"
NOT_SET = "(not set)"
BEAT_SECONDS = 10.0
SILENT_SECONDS = 60.0  # the same for all who may want the directory
# What belongs to a step, whole or not, and TensorBoard's events.
_OURS_BY_NAME = re.compile(
    r"(\.partial_(replaced_)?)?step_[0-9]{6,}.*|events\.out\.tfevents\..*"
)


class OwnedDirectory:
    """The directory at `path`, which need not be there.

    kind: what its manifest says that it holds. names: of what the command writes besides the
    manifest. folders_of_steps: those in which every name tells a step. option: what errors write
    before the path. fix: what to do about another identity.
    """

    kind: ClassVar[str]
    names: ClassVar[tuple[str, ...]]
    folders_of_steps: ClassVar[tuple[str, ...]] = ()
    manifest: ClassVar[str] = "manifest.json"
    option: ClassVar[str] = "--out "
    fix: ClassVar[str] = "set it back, name another directory, or give --overwrite"

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._where = f"{self.option}{path}"
        self._a_kind = f"{'an' if self.kind[0] in 'aeiou' else 'a'} {self.kind}"

    def entries(self) -> list[Path]:
        """What the command has written, the manifest last; a folder without a file in it does not
        count.
        """
        there = [self.path / name for name in (*self.names, self.manifest)]
        return [path for path in there if _is_written(path)]

    def check(self) -> None:
        """Errors: `UserError` for a place where the command cannot write, or that is another's."""
        try:
            is_file = self.path.exists() and not self.path.is_dir()
        except OSError as error:
            raise self._unwritable(error) from None
        if is_file:
            raise UserError(f"{self._where} is a file; name a directory")
        if self.read_manifest() is None and (found := self.entries()):
            raise UserError(
                f"{self._where} holds {found[0].name} but no {self.manifest} of {self._a_kind}; "
                "name another directory"
            )

    def read_manifest(self) -> dict[str, Any] | None:
        """None where there is none. Errors: `UserError` for one of something else."""
        path = self.path / self.manifest
        if not path.exists():
            return None
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read: {error}") from None
        if not isinstance(found, dict) or found.get("kind") != self.kind:
            raise UserError(
                f"{self._where} holds something other than {self._a_kind}; name another directory"
            )
        return found

    def write_manifest(self, content: Mapping[str, Any]) -> None:
        """Whole or not at all. content: JSON, with the `identity` that `check_same` compares."""
        write_json(self.path / self.manifest, {"kind": self.kind, **content})

    def check_same(self, identity: Mapping[str, Any], growing: str = "") -> None:
        """Errors: `UserError` naming what differs from the identity in the manifest, if there is
        one. growing: a mapping in it, whose keys may come and stay away.
        """
        manifest = self.read_manifest()
        before = flatten(identity if manifest is None else manifest.get("identity", {}))
        now = flatten(identity)
        for name in dict.fromkeys((*before, *now)):
            old, new = before.get(name, NOT_SET), now.get(name, NOT_SET)
            may_lack = (
                growing and name.startswith(f"{growing}.") and NOT_SET in (old, new)
            )
            if old != new and not may_lack:
                raise UserError(
                    f"{self._where} holds {self._a_kind} with {name}={old}, not {new}; {self.fix}"
                )

    def clear(self, needed: Sequence[Path] = ()) -> None:
        """Delete what the command has written, and nothing else; after `check`.

        needed: what the command reads. Errors: `UserError` where that would be deleted.
        """
        entries = self.entries()
        for path in needed:
            if any(path.resolve().is_relative_to(entry.resolve()) for entry in entries):
                raise UserError(
                    f"{self._where} holds {path}, which this {self.kind} reads; --overwrite would "
                    "delete it, so name another directory"
                )
        for (
            entry
        ) in entries:  # what a kill leaves has its manifest: it can be cleared again
            is_link = entry.is_symlink() and entry.is_dir()
            if not (is_link and entry.name in self.folders_of_steps):
                remove(entry)
                continue
            # A link to another disk stays, for what comes next. More may lie there than ours.
            for inner in entry.iterdir():
                if _OURS_BY_NAME.fullmatch(inner.name):
                    remove(inner)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Have the directory, which is made if need be. Called by rank 0 alone.

        Errors: `UserError` naming host and process that has it, or why it cannot be written.
        """
        lease = self._lease()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._acquire(lease)
        except OSError as error:
            raise self._unwritable(error) from None
        try:
            yield
        finally:
            with suppress(OSError):
                lease.release()

    def _lease(self) -> SoftFileLease:
        def leave(lost: LeaseCompromise) -> None:
            """At once where another process has taken the lock over, which was not touched."""
            if lost.reason == "owner-changed":
                say(
                    f"error: {self._where} was taken over by {_owner_of(lease)}, as this process "
                    f"gave no sign of life for {SILENT_SECONDS:.0f} s",
                    error=True,
                )
                os._exit(2)

        lease = SoftFileLease(
            self.path / LOCK,
            lease_duration=SILENT_SECONDS,
            heartbeat_interval=BEAT_SECONDS,
            on_compromise=leave,
        )
        return lease

    def _acquire(self, lease: SoftFileLease) -> None:
        """Errors: `UserError` where its owner lives: on this machine at once."""
        try:
            lease.acquire(blocking=False)
            return
        except Timeout:
            self._refuse_own_machine(lease)
        line = f"{self.path} has a lock of {_owner_of(lease)}: waiting to see whether it is alive"
        say(line, error=True)
        try:
            lease.acquire(
                timeout=2 * SILENT_SECONDS, poll_interval=min(1.0, SILENT_SECONDS / 10)
            )
        except Timeout:
            raise self._in_use(lease) from None

    def _refuse_own_machine(self, lease: SoftFileLease) -> None:
        """Errors: `UserError` for an owner of this process table; a dead one has been removed."""
        owner = lease.owner
        with TemporaryDirectory() as place, SoftFileLease(Path(place) / LOCK) as mine:
            me = mine.owner
            if owner is not None and me is not None and owner.hostname == me.hostname:
                raise self._in_use(lease) from None

    def _in_use(self, lease: SoftFileLease) -> UserError:
        return UserError(
            f"{self._where} is in use by {_owner_of(lease)}; stop it (kill its process: a run "
            "checkpoints first) or name another directory"
        )

    def _unwritable(self, error: OSError) -> UserError:
        return UserError(
            f"{self._where} cannot be written ({error.strerror}); name another directory"
        )


_as_json = partial(json.dumps, ensure_ascii=False, sort_keys=True)


def flatten(
    tree: Mapping[Any, Any], show: Callable[[Any], str] = _as_json, prefix: str = ""
) -> dict[str, str]:
    """Dotted name -> the value as text."""
    flat: dict[str, str] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        inner = isinstance(value, dict)
        flat |= flatten(value, show, f"{name}.") if inner else {name: show(value)}
    return flat


def _is_written(path: Path) -> bool:
    if path.is_dir():
        return any(child.is_file() for child in path.rglob("*"))
    return path.exists() or path.is_symlink()


def _owner_of(lease: SoftFileLease) -> str:
    owner = lease.owner
    if owner is None:
        return "another process"
    return f"process {owner.pid} on {owner.hostname.partition('?')[0]}"
