"""A trainer rank's end of an engine on another node: its host (`host`) is asked for a process."""

import logging
import time
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from megatron_opsft.errors import EngineDied, UserError
from megatron_opsft.rollout.remote.addresses import Address
from megatron_opsft.rollout.remote.host import set_heartbeat
from megatron_opsft.rollout.remote.keys import derive_keys
from megatron_opsft.rollout.remote.words import Word

log = logging.getLogger("megatron_opsft")

_POLL_MS = 20
_REFUSALS = 3  # a host may end in the middle of a handshake, though hardly so often
_SAY_SECONDS = 10.0
# The host hangs up in the handshake: with another token it cannot read a word.
_HUNG_UP = (
    zmq.Event.HANDSHAKE_FAILED_AUTH,
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL,
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL,
    zmq.Event.DISCONNECTED,
)


class HostedEngine:
    """One engine process of a host; like `EngineProcess`, but by messages."""

    def __init__(
        self, context: zmq.Context[Any], address: Address, token: str, wait_seconds: float
    ) -> None:
        """Waits until the host answers, at most so long.

        Errors: `UserError` where another token is wanted or another trainer is there; `EngineDied`
        where nobody answers.
        """
        self._address = address
        self._why = ""
        self.pid = 0
        keys = derive_keys(token)
        self._socket = context.socket(zmq.DEALER)
        self._socket.curve_serverkey = keys.host.public
        self._socket.curve_publickey = keys.trainer.public
        self._socket.curve_secretkey = keys.trainer.secret
        self._socket.ipv6 = ":" in address.host
        self._socket.reconnect_ivl_max = 1000
        set_heartbeat(self._socket)
        self._monitor = self._socket.get_monitor_socket()
        self._replies: list[bytes] = []
        try:
            self._socket.connect(f"tcp://{address}")
            self._open(wait_seconds)
        except BaseException:
            self.close()
            raise

    def _open(self, wait_seconds: float) -> None:
        start = said = time.monotonic()
        self._socket.send_multipart([Word.OPEN, b""])
        refusals = 0
        while not self.pid:
            if self._monitor.poll(_POLL_MS):
                event = recv_monitor_message(self._monitor)["event"]
                refusals += event in _HUNG_UP
                refusals += _REFUSALS * (event == zmq.Event.HANDSHAKE_FAILED_AUTH)
            if refusals >= _REFUSALS:
                raise UserError(
                    f"rollout.engines: the engine at {self._address} refuses this run's token; "
                    "start both with the same one (rollout.engine_token_file)"
                )
            self._listen()
            now = time.monotonic()
            if now - start > wait_seconds:
                raise EngineDied(
                    f"rollout.engines: nobody answers at {self._address} after {wait_seconds:.0f} "
                    f"s; start `megatron-opsft engine --listen {self._address}` there, or correct "
                    "the address"
                )
            if now - said > _SAY_SECONDS:
                said = now
                log.info("waiting for the engine at %s", self._address)
        self._why = ""

    def can_send(self, milliseconds: int) -> bool:
        """See `EngineProcess.can_send`: its host keeps it until then."""
        return True

    def send(self, content: bytes) -> None:
        """To the engine process."""
        self._socket.send_multipart([Word.REQUEST, content])

    def poll(self, milliseconds: int) -> bool:
        """Whether something has come from the engine process."""
        if not self._replies and self._socket.poll(milliseconds):
            self._listen()
        return bool(self._replies)

    def receive(self) -> bytes:
        """What has come first."""
        return self._replies.pop(0)

    def ended(self) -> str:
        """Why the engine process is not there any more; "" while it is."""
        self._listen()
        while not self._why and self._monitor.poll(0):
            if recv_monitor_message(self._monitor)["event"] == zmq.Event.DISCONNECTED:
                self._why = "was lost: the connection to its node is closed"
        return "" if self._replies else self._why

    def _listen(self) -> None:
        while self._socket.poll(0):
            match self._socket.recv_multipart():
                case [Word.OPENED, pid]:
                    self.pid = int(pid)
                case [Word.BUSY, _]:
                    self._why = "is in use by another trainer"
                    raise UserError(
                        f"rollout.engines: the engine at {self._address} {self._why}; give every "
                        "run its own"
                    )
                case [Word.REPLY, content]:
                    self._replies.append(content)
                case [Word.ENDED, how]:
                    self._why = how.decode()

    def last_words(self) -> str:
        """Where it was."""
        return f"its node: {self._address}"

    def close(self) -> None:
        """Let the host end the process, if it is still there."""
        if self.pid and not self._why:
            self._socket.send_multipart([Word.CLOSE, b""])
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=500)
