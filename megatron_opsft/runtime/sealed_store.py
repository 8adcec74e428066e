"""A job's store for values that no stranger can put there.

The store answers whoever connects to it and tells its keys. So every value carries a seal, made
with a secret that only the job's ranks have: what has none is not read.
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
        self._store.set(self._key(name), self._sealed(name, text))

    def read(self, names: Sequence[str]) -> list[str | None]:
        """The text of each; None where it is not a rank's. All are None where one is not there, as
        when a stranger has deleted it: ranks put theirs there again and again.
        """
        keys = [self._key(name) for name in names]
        if not self._store.check(keys):
            return [None] * len(names)
        values = self._store.multi_get(keys)
        return [
            self._opened(name, value) for name, value in zip(names, values, strict=True)
        ]

    def agree(self, name: str, text: str | None) -> str | None:
        """What a rank has put there, or now this text; the first one stays. None without any."""
        key, held = self._key(name), b""
        if self._store.check([key]):
            held = self._store.get(key)
        found = self._opened(name, held)
        if found is None and text is not None:
            now = self._store.compare_set(key, held, self._sealed(name, text))
            found = self._opened(name, now)
        return found

    def join(self, name: str, rank: int) -> None:
        """Add a rank to a list of ranks.

        No counter: torch's store closes the connection of whoever adds to one that somebody has
        made a text.
        """
        self._store.append(
            self._key(name), f"\n{self._sealed(name, str(rank)).decode()}\n"
        )

    def joined(self, name: str) -> list[int]:
        """The ranks that are in the list, each once, in the order in which they came."""
        key = self._key(name)
        lines = self._store.get(key).splitlines() if self._store.check([key]) else []
        ranks = (self._opened(name, line) for line in lines)
        return [*dict.fromkeys(int(rank) for rank in ranks if rank is not None)]

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _sealed(self, name: str, text: str) -> bytes:
        return f"{self._seal(name, text)} {text}".encode()

    def _seal(self, name: str, text: str) -> str:
        """It holds for this key alone."""
        return hmac.digest(
            self._secret, f"{self._key(name)} {text}".encode(), "sha256"
        ).hex()

    def _opened(self, name: str, value: bytes) -> str | None:
        seal, _, text = value.decode(errors="replace").partition(" ")
        is_ours = hmac.compare_digest(seal.encode(), self._seal(name, text).encode())
        return text if is_ours else None
