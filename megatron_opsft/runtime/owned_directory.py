"""A directory that one command writes: that of a run, an evaluation, a diagnosis, a study's run.

Only one process writes it at a time, on shared file systems too. The same command continues the
work in it. Files that others put there are neither mistaken for the command's nor deleted.

The lock is filelock's lease: a file that only one process can create, with its host and process id,
which its owner touches regularly. On the owner's machine the process table tells whether the owner
lives. On any other machine only time does: a lock that was not touched for `SILENT_SECONDS` is
taken over. No clocks are compared, and no lock service of the file system is needed.
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
from megatron_opsft.records import JsonObject
from megatron_opsft.runtime.console import say
from megatron_opsft.runtime.durable import remove, write_json

LOCK = ".run_lock"
NOT_SET = "(not set)"
BEAT_SECONDS = 10.0
SILENT_SECONDS = 60.0  # the same for all processes that may want the directory
# Files and folders of a step, complete or not, and TensorBoard's events.
_WRITTEN_BY_RUN = re.compile(
    r"(\.partial_(replaced_)?)?step_[0-9]{6,}.*|events\.out\.tfevents\..*"
)


class OwnedDirectory:
    """The directory at `path`, which may not exist yet. A subclass describes one kind of it."""

    kind: ClassVar[str]
    """The kind of directory, as the manifest names it."""
    names: ClassVar[tuple[str, ...]]
    """Names of the files and folders that the command writes besides the manifest."""
    folders_of_steps: ClassVar[tuple[str, ...]] = ()
    """Those folders in which every name contains a step."""
    manifest: ClassVar[str] = "manifest.json"
    lock: str = LOCK
    """Name of the file that is the lock."""
    option: ClassVar[str] = "--out "
    """What error messages write before the path."""
    fix: ClassVar[str] = "set it back, name another directory, or give --overwrite"
    """What error messages advise if the identity differs."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._where = f"{self.option}{path}"
        self._a_kind = f"{'an' if self.kind[0] in 'aeiou' else 'a'} {self.kind}"

    def entries(self) -> list[Path]:
        """Return the files and folders that the command has written, the manifest last. A folder
        without any file in it does not count.
        """
        paths = [self.path / name for name in (*self.names, self.manifest)]
        return [path for path in paths if _is_written(path)]

    def check(self) -> None:
        """Errors: `UserError` if the path cannot be a directory of this command, or belongs to
        another one.
        """
        try:
            is_file = self.path.exists() and not self.path.is_dir()
        except OSError as error:
            raise self._unwritable(error) from None
        if is_file:
            raise UserError(f"{self._where} is a file; name a directory")
        if self.read_manifest() is None and (entries := self.entries()):
            raise UserError(
                f"{self._where} holds {entries[0].name} but no {self.manifest} of {self._a_kind}; "
                "name another directory"
            )

    def read_manifest(self) -> JsonObject | None:
        """Return the manifest; None if there is none. Errors: `UserError` for another kind's."""
        path = self.path / self.manifest
        if not path.exists():
            return None
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read: {error}") from None
        if not isinstance(manifest, dict) or manifest.get("kind") != self.kind:
            raise UserError(
                f"{self._where} holds something other than {self._a_kind}; name another directory"
            )
        return manifest

    def write_manifest(self, content: Mapping[str, Any]) -> None:
        """Write the manifest completely or not at all. content: JSON, in which `identity` is what
        `check_same` compares.
        """
        write_json(self.path / self.manifest, {"kind": self.kind, **content})

    def check_same(
        self,
        identity: Mapping[str, Any],
        growing: str = "",
        explain: Callable[[str], str] = lambda name: "",
    ) -> None:
        """Errors: `UserError` naming what differs from the identity in the manifest, if there is
        one. growing: a mapping of the identity, in which keys may be missing on either side.
        explain: says in words that a part is another, such as a hash; "" for a plain value.
        """
        manifest = self.read_manifest()
        if manifest is None:
            return
        before, now = flatten(manifest.get("identity", {})), flatten(identity)
        for name in dict.fromkeys((*before, *now)):
            old, new = before.get(name, NOT_SET), now.get(name, NOT_SET)
            if NOT_SET in (old, new) and name.startswith(f"{growing}."):
                continue
            if old != new and (words := explain(name)):
                raise UserError(f"{self._where}: {words}; {self.fix}")
            if old != new:
                raise UserError(
                    f"{self._where} holds {self._a_kind} with {name}={old}, not {new}; {self.fix}"
                )

    def clear(self, needed: Sequence[Path] = ()) -> None:
        """Delete all that the command has written, and nothing else. Call `check` before.

        needed: paths that the command reads. Errors: `UserError` if one of them would be deleted.
        """
        entries = self.entries()
        for path in needed:
            if any(path.resolve().is_relative_to(entry.resolve()) for entry in entries):
                raise UserError(
                    f"{self._where} holds {path}, which this {self.kind} reads; --overwrite would "
                    "delete it, so name another directory"
                )
        # The manifest goes last: after a kill the directory can be cleared again.
        for entry in entries:
            is_link = entry.is_symlink() and entry.is_dir()
            if is_link and entry.name in self.folders_of_steps:
                # A link to a folder on another disk stays. Files of others may be in it.
                for child in entry.iterdir():
                    if _WRITTEN_BY_RUN.fullmatch(child.name):
                        remove(child)
            else:
                remove(entry)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Create the directory if needed, and hold its lock. Called by rank 0 alone.

        Errors: `UserError` naming the host and process that hold it, or why it cannot be written.
        """
        self._lease = SoftFileLease(
            self.path / self.lock,
            lease_duration=SILENT_SECONDS,
            heartbeat_interval=BEAT_SECONDS,
            on_compromise=self._end_if_taken_over,
        )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._acquire()
        except OSError as error:
            raise self._unwritable(error) from None
        try:
            yield
        finally:
            with suppress(OSError):
                self._lease.release()

    def _end_if_taken_over(self, event: LeaseCompromise) -> None:
        """End this process if another one has taken the lock over."""
        if event.reason == "owner-changed":
            say(
                f"error: {self._where} was taken over by {self._owner()}, as this process "
                f"gave no sign of life for {SILENT_SECONDS:.0f} s",
                error=True,
            )
            os._exit(2)

    def _acquire(self) -> None:
        """Take the lock. Errors: `UserError` if its owner lives; at once if on this machine."""
        try:
            self._lease.acquire(blocking=False)
            return
        except Timeout:
            self._refuse_own_machine()
        say(
            f"{self.path} has a lock of {self._owner()}: waiting to see whether it is alive",
            error=True,
        )
        try:
            self._lease.acquire(
                timeout=2 * SILENT_SECONDS, poll_interval=min(1.0, SILENT_SECONDS / 10)
            )
        except Timeout:
            raise self._in_use() from None

    def _refuse_own_machine(self) -> None:
        """Errors: `UserError` if the owner is in this machine's process table. filelock has removed
        the lock of a dead one already.
        """
        owner = self._lease.owner
        # A lock of this process shows how filelock writes this machine's name.
        with TemporaryDirectory() as folder, SoftFileLease(Path(folder) / LOCK) as own:
            me = own.owner
            if owner and me and owner.hostname == me.hostname:
                raise self._in_use() from None

    def _owner(self) -> str:
        """Return, for example, `process 4711 on node042`."""
        owner = self._lease.owner
        if owner is None:
            return "another process"
        return f"process {owner.pid} on {owner.hostname.partition('?')[0]}"

    def _in_use(self) -> UserError:
        """Return the error for a directory whose lock a living process holds."""
        return UserError(
            f"{self._where} is in use by {self._owner()}; stop it (kill its process: a run "
            "checkpoints first) or name another directory"
        )

    def _unwritable(self, error: OSError) -> UserError:
        """Return the error for a directory that cannot be made or written."""
        return UserError(
            f"{self._where} cannot be written ({error.strerror}); name another directory"
        )


# Words of `describe_change` for what several kinds of directories depend on.
OTHER_WEIGHTS = "the weights in {} are not those"
OTHER_TOKENIZER = "the tokenizer and chat template of {} are not those"
OTHER_PROBLEMS = "the problems in {} are not those"
OTHER_JUDGE = "the code of the judge {} is not the one"


def describe_change(words: str, now: object, before: object, kind: str) -> str:
    """Say that something is not what the work in a directory was started with.

    words: such as "the problems in {} are not those", where {} stands for the place. now, before:
    the place, which may be the same. kind: that of the directory.
    """
    then = f"{before} as it was then" if before == now else before
    return f"{words.format(now)} that this {kind} was started with ({then})"


_as_json = partial(json.dumps, ensure_ascii=False, sort_keys=True)


def flatten(
    tree: Mapping[Any, Any], show: Callable[[Any], str] = _as_json, prefix: str = ""
) -> dict[str, str]:
    """Return dotted name -> the value as text, for all values of nested mappings.

    An empty mapping inside of another one is a value, such as an argument of a chat template.
    """
    flat: dict[str, str] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and (value or not prefix):
            flat |= flatten(value, show, f"{name}.")
        else:
            flat[name] = show(value)
    return flat


def _is_written(path: Path) -> bool:
    """True for a file, a link, and a folder with a file somewhere in it."""
    if path.is_dir():
        return any(child.is_file() for child in path.rglob("*"))
    return path.exists() or path.is_symlink()
