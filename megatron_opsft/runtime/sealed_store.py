"""A job's store for values that no stranger can put there.

torch's store answers whoever connects to it, and lists its keys. So every value carries a seal,
made with a secret that only the job's ranks have. A value without a valid seal is ignored.
"""

import hmac
from collections.abc import Sequence
from typing import Any


class SealedStore:
    """The keys below `prefix` of torch's `store`. secret: the same on every rank of the job."""

    def __init__(self, store: Any, prefix: str, secret: bytes) -> None:
        self._store = store
        self._prefix = prefix
        self._secret = secret

    def put(self, name: str, text: str) -> None:
        """Make the text available to all ranks."""
        self._store.set(self._key(name), self._seal(name, text))

    def read(self, names: Sequence[str]) -> list[str | None]:
        """Return the text of each name; None for one that no rank has put there.

        All are None if one is missing, as when a stranger has deleted it: ranks put theirs there
        again and again.
        """
        keys = [self._key(name) for name in names]
        if not self._store.check(keys):
            return [None] * len(names)
        return list(map(self._open, names, self._store.multi_get(keys)))

    def agree(self, name: str, text: str | None) -> str | None:
        """Put `text` under `name` unless a rank was quicker; return the text that is there.

        None if there is none and `text` is None.
        """
        key = self._key(name)
        value = self._store.get(key) if self._store.check([key]) else b""
        agreed = self._open(name, value)
        if agreed is None and text is not None:
            # Replaces only the value just seen: another rank may be quicker.
            value = self._store.compare_set(key, value, self._seal(name, text))
            agreed = self._open(name, value)
        return agreed

    def join(self, name: str, rank: int) -> None:
        """Add a rank to a list of ranks.

        The list is no counter, because torch's store closes the connection of a rank that adds to a
        counter which somebody has replaced by a text.
        """
        self._store.append(self._key(name), b"\n%b\n" % self._seal(name, str(rank)))

    def joined(self, name: str) -> list[int]:
        """Return the ranks in the list, each once, in the order in which they came."""
        key = self._key(name)
        if not self._store.check([key]):
            return []
        texts = [self._open(name, line) for line in self._store.get(key).splitlines()]
        return list(dict.fromkeys(int(text) for text in texts if text is not None))

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _seal(self, name: str, text: str) -> bytes:
        """Return the text with a seal before it, which is valid for this key alone."""
        message = f"{self._key(name)} {text}".encode()
        seal = hmac.digest(self._secret, message, "sha256").hex()
        return f"{seal} {text}".encode()

    def _open(self, name: str, value: bytes) -> str | None:
        """Return the text of a sealed value; None if the seal is not valid."""
        decoded = value.decode(errors="replace")
        _, _, text = decoded.partition(" ")
        is_valid = hmac.compare_digest(decoded.encode(), self._seal(name, text))
        return text if is_valid else None
