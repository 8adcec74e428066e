"""Where an engine of another node listens: `host:port`, or `[address]:port` of IPv6."""

import re
from dataclasses import dataclass

from megatron_opsft.errors import UserError

_FORM = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.%\w]+)\]|(?P<host>[^\s:\[\]/]+)):(?P<port>\d{1,5})")


@dataclass(frozen=True, slots=True)
class Address:
    """A name or an address of a machine, and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def parse_address(text: str, what: str) -> Address:
    """what: names it in a message. Errors: `UserError` for anything but a host and a port; for all
    interfaces at once.
    """
    match = _FORM.fullmatch(text.strip())
    if match is None or not 0 < int(match["port"]) < 65536:
        raise UserError(f"{what}={text}: write HOST:PORT, such as node7:15100 or [fd00::7]:15100")
    host = match["six"] or match["host"]
    if host in ("*", "0.0.0.0", "::"):
        raise UserError(
            f"{what}={text}: name one address of the machine, that of the job's network; not all"
        )
    return Address(host, int(match["port"]))
