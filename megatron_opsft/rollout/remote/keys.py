"""The secret of a job, by which its trainer and its engines on other nodes know each other.

It is read from a file that only its owner can open, or from the environment; it is never on a
command line, in a log or on the network. Both sides derive the key pairs of CurveZMQ from it, so
that whoever lacks it is refused in the handshake, and what is said is encrypted.
"""

import hashlib
import hmac
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from megatron_opsft.errors import UserError

TOKEN_VARIABLE = "MEGATRON_OPSFT_ENGINE_TOKEN"
_LEAST_CHARACTERS = 32
_MAKE_ONE = "openssl rand -hex 32 > FILE && chmod 600 FILE"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    """Of CurveZMQ, in the text form that it takes."""

    public: bytes
    secret: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The same on both sides."""

    host: KeyPair
    trainer: KeyPair


def derive_keys(token: str) -> Keys:
    """From the job's secret."""
    return Keys(host=_pair(token, b"engine host"), trainer=_pair(token, b"trainer"))


def _pair(token: str, role: bytes) -> KeyPair:
    secret = z85.encode(hmac.digest(token.encode(), b"megatron-opsft " + role, hashlib.sha256))
    return KeyPair(public=zmq.curve_public(secret), secret=secret)


def read_token(file: Path | None, environment: Mapping[str, str] = os.environ) -> str:
    """The job's secret, from `file` or else the environment.

    Errors: `UserError` where there is none, where others can read the file, and for a short one.
    """
    if file is None:
        token, where = environment.get(TOKEN_VARIABLE, ""), TOKEN_VARIABLE
    else:
        token, where = _read(file), str(file)
    token = token.strip()
    if not token:
        raise UserError(
            "engines on other nodes need the job's token: set rollout.engine_token_file (of "
            f"`engine`: --token-file) or {TOKEN_VARIABLE}; {_MAKE_ONE} makes one"
        )
    if len(token) < _LEAST_CHARACTERS:
        raise UserError(
            f"the token in {where} has {len(token)} characters, and could be guessed; it must have "
            f"{_LEAST_CHARACTERS}: {_MAKE_ONE}"
        )
    return token


def _read(file: Path) -> str:
    try:
        if file.stat().st_mode & 0o077:
            raise UserError(f"others can read the token in {file}: chmod 600 {file}")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the token file {file} cannot be read: {error}") from error
