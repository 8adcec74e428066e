"""The Hugging Face hub, where it is asked for anything: found out of reach at once, not after
minutes of retries.
"""

import logging
import os
import socket
import sys
from functools import cache
from urllib.parse import urlsplit
from urllib.request import getproxies

_PATIENCE_SECONDS = 10.0
_OFFLINE = "HF_HUB_OFFLINE"  # of Hugging Face's libraries: only their caches are read
# They read the variable when they are imported.
_READERS = ("huggingface_hub.constants", "datasets.config")
_log = logging.getLogger("megatron_opsft")


def is_offline() -> bool:
    """Whether the libraries only read their caches."""
    return os.environ.get(_OFFLINE, "").upper() in ("1", "ON", "YES", "TRUE")


@cache
def prepare_hub() -> bool:
    """Turn the libraries' offline mode on where no connection to the hub can be opened, and say
    whether that was so. To be called before they are asked for anything; a proxy is left to them.
    """
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    if is_offline() or getproxies().keys() & {endpoint.scheme, "all"}:
        return False
    port = endpoint.port or (80 if endpoint.scheme == "http" else 443)
    try:
        socket.create_connection((endpoint.hostname or "", port), _PATIENCE_SECONDS).close()
    except OSError as error:
        if os.environ.get("RANK", "0") == "0":
            reason = error.strerror or error
            _log.warning(
                "%s cannot be reached (%s): only what is in its cache here is used",
                *(endpoint.hostname, reason),
            )
        os.environ[_OFFLINE] = "1"
        for name in _READERS:
            if name in sys.modules:
                setattr(sys.modules[name], _OFFLINE, True)
        return True
    return False


def describe_offline() -> str:
    """Why the hub is not asked."""
    return "the hub cannot be reached" if prepare_hub() else f"{_OFFLINE}=1 is set"
