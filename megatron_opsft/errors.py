"""Errors a user can act on: one line that names what is wrong, where, and how to fix it; and the
log, for what the user should know although the work goes on.
"""

import logging
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger("megatron_opsft")


class UserError(Exception):
    """Bad input (config, data, checkpoint, environment); the command line exits with 2."""


class PromptError(UserError):
    """A problem text that cannot become a prompt. Code that reads rows counts it as a bad row."""


class HubUnreachable(UserError):
    """The Hugging Face hub does not answer now, and the cache lacks what is needed.

    The command line exits with 69, so that a scheduler starts the job again.
    """


class RowError(ValueError):
    """A row of the data that cannot be used; the text says why, in one line."""


class NonFiniteError(Exception):
    """A loss, a gradient or logits were not finite, and were not used. Exits with 3."""


class SyncError(Exception):
    """The rollout engine does not hold the trainer's weights after a weight sync. Exits with 3."""


class RanksMissing(Exception):
    """Ranks of the job did not join at the start. Exits with 69."""


class NothingLeft(Exception):
    """A resumed run has done all its steps and saved its model: no error, and nothing to do."""


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, then the error that caused it or was handled when it came up, and so on."""
    seen = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or error.__context__


def first_line(error: BaseException) -> str:
    """Return the kind and the first line of an error, for errors of other packages."""
    return f"{type(error).__name__}: {error}".split("\n")[0]


def plural(noun: str, *numbers: float) -> str:
    """Return a regular noun as it stands behind these numbers: `step` if all are 1, else `steps`.

    It is here, not in `runtime.formatting`, because the configuration needs it too.
    """
    return noun if all(number == 1 for number in numbers) else f"{noun}s"


_config_files: list[Path] = []  # that this process has read


def remember_config_file(file: Path) -> None:
    """Note that settings of the user's come from a YAML file, for `looked_in`."""
    if file not in _config_files:
        _config_files.append(file)


def looked_in(path: str | Path) -> str:
    """Return where a path that leads nowhere was looked for, as text behind it: " in DIRECTORY",
    and how to write it if it lies beside a YAML file of the settings. "" for an absolute path.
    """
    path = Path(path).expanduser()
    if path.is_absolute() or path.exists():
        return ""
    text = f" in {Path.cwd()}"
    for file in _config_files:
        beside = file.parent / path
        if beside.exists():
            return f"{text}, from where paths count; it lies beside {file.name}: write {beside}"
    return text


ANSWER_IS_NO = 4
"""Exit code of a command that worked and whose answer is no: a run does not fit, weights differ."""
