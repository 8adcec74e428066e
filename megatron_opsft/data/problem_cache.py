"""Problems and their prompts, read and tokenised by one process and then shared: one Arrow file in
the cache of Hugging Face's libraries, mapped into the memory of every rank of a node.

Whichever rank comes first makes it and the others wait; runs of the same data, tokenizer and
template share it. It can be deleted at any time. Where it cannot be written every rank reads and
tokenises for itself.
"""

import fcntl
import hashlib
import json
import logging
import os
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TextIO

from megatron_opsft.config import DataConfig
from megatron_opsft.config_section import SHIPPED_TEMPLATES
from megatron_opsft.data.problem_table import (
    StoredPrompts,
    open_table,
    prompt_key,
    stored_set,
    write_table,
)
from megatron_opsft.data.problems import ARITHMETIC, ProblemSet
from megatron_opsft.data.prompts import PromptEncoder
from megatron_opsft.data.sources import identify
from megatron_opsft.records import Problem

PATIENCE_SECONDS = 300.0  # with another process that makes the file; it may have been stopped
_POLL_SECONDS = 0.1
_TOKENIZER_ENDINGS = (".json", ".jinja", ".txt", ".model")
_NOT_SHARED = "every rank tokenises the data for itself: %s"
_log = logging.getLogger(__name__)

Encode = Callable[[Problem], Sequence[int]]


def share_problems(
    data: DataConfig,
    encoder: PromptEncoder,
    model_dir: Path,
    read: Callable[[Encode], ProblemSet],
    *,
    with_fields: bool = False,
) -> tuple[ProblemSet, PromptEncoder]:
    """What `read` returns, and an encoder that knows the prompts of its problems.

    read: from `data`, with each problem encoded by what it is given; called where the cache
    has no such set, its errors pass. with_fields: whether it reads other columns too. Called by
    every rank; needs no process group.
    """
    sources = [
        "" if part.path == ARITHMETIC else identify(part.path, str(part.split), part.subset)
        for part in data.parts
    ]
    key = _key(data, sources, encoder, model_dir, with_fields=with_fields)
    path = _directory() / f"{key}.arrow"
    if (table := open_table(path)) is None:
        with _turn(path) as may_write:
            if (table := open_table(path)) is None:
                problems, prompts = _read(encoder, read)
                if not may_write or not _write(path, problems, prompts):
                    return problems, encoder
                del problems, prompts
                table = open_table(path)
    if table is None:  # deleted in this moment
        return read(encoder.encode), encoder
    return stored_set(table), replace(encoder, known=StoredPrompts(table).find)


def _directory() -> Path:
    """Beside the models and data sets of Hugging Face's libraries."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
    return Path(home).expanduser() / "megatron_opsft/problems"


def _key(
    data: DataConfig,
    sources: list[str],
    encoder: PromptEncoder,
    model_dir: Path,
    *,
    with_fields: bool,
) -> str:
    """Of all that problems and prompts depend on."""
    settings = data.model_dump(mode="json", exclude={"prompts_per_step"})
    files = {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in model_dir.iterdir()
        if file.name.endswith(_TOKENIZER_ENDINGS)
    }
    code = [module.read_text(encoding="utf-8") for module in Path(__file__).parent.glob("*.py")]
    libraries = [version(name) for name in ("transformers", "tokenizers")]
    if data.template not in SHIPPED_TEMPLATES:
        settings["template"] = Path(data.template).read_text(encoding="utf-8")
    parts = [settings, with_fields, sources, files, sorted(code), libraries, encoder.example]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


@contextmanager
def _turn(path: Path) -> Iterator[bool]:
    """Whether this process may write `path`, when no other one does; not where the file system
    forbids it, and not where another takes too long.
    """
    with ExitStack() as held:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = held.enter_context(path.with_suffix(".lock").open("a"))
            alone = _wait_for(lock)
        except OSError as error:
            _log.warning(_NOT_SHARED, error)
            alone = False
        yield alone


def _wait_for(lock: TextIO) -> bool:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(_POLL_SECONDS)
    return False


def _read(
    encoder: PromptEncoder, read: Callable[[Encode], ProblemSet]
) -> tuple[ProblemSet, dict[str, array]]:
    """What `read` returns, and the prompt of each problem that it has encoded."""
    prompts: dict[str, array] = {}

    def encode(problem: Problem) -> Sequence[int]:
        prompts[prompt_key(problem)] = ids = array("i", encoder.encode(problem))
        return ids

    return read(encode), prompts


def _write(path: Path, problems: ProblemSet, prompts: dict[str, array]) -> bool:
    try:
        write_table(path, problems, prompts)
    except OSError as error:
        _log.warning(_NOT_SHARED, error)
        return False
    return True
