"""`complete.json` of a checkpoint: its step, what the run counts, and checksums of every file and
of itself.
"""

import json
import zlib
from pathlib import Path
from typing import Any

from megatron_opsft.model.checkpoint_write import checksum
from megatron_opsft.runtime.durable import COMPLETE, step_in

_SEAL = "checksum"  # of all else in the file


def sealed(manifest: dict[str, Any]) -> bytes:
    """The content of `complete.json`, with a checksum of itself."""
    read_back = json.loads(json.dumps(manifest))
    return json.dumps({**read_back, _SEAL: _crc(read_back)}, indent=1).encode()


def _crc(manifest: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def read_manifest(path: Path) -> dict[str, Any] | str:
    """Of a checkpoint, if it is as it was written, else what is not."""
    try:
        manifest = json.loads((path / COMPLETE).read_text(encoding="utf-8"))
        step, files, seal = manifest["step"], manifest["files"], manifest.pop(_SEAL)
        if step == step_in(path.name) and files.items() and seal == _crc(manifest):
            return manifest
    except OSError as error:
        what = "is missing" if isinstance(error, FileNotFoundError) else f"{error.strerror}"
        return f"checkpoint file {path / COMPLETE} {what}"
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    return f"checkpoint file {path / COMPLETE} is damaged"


def damage_of(path: Path, expected: list[int]) -> str | None:
    """How a file differs from its size and checksum."""
    try:
        found = checksum(path)
    except FileNotFoundError:
        return f"checkpoint file {path} is missing"
    except OSError as error:
        return f"checkpoint file {path} cannot be read: {error.strerror}"
    if found[0] != expected[0]:
        return f"checkpoint file {path} is damaged: {found[0]:,} bytes instead of {expected[0]:,}"
    return None if found == expected else f"checkpoint file {path} is damaged: its checksum differs"
