"""`megatron-opsft engine`: keeps an engine for one trainer rank at a time, on a node of its own.

It listens at one address, to nobody but holders of the job's token, and understands three words;
what trainer and engine process say to each other it passes on unread. A trainer that opens it gets
a new engine process, which ends with that trainer's connection. It ends itself when no trainer has
come for a while.
"""

import logging
import time
from collections import deque
from pathlib import Path
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from megatron_opsft.errors import UserError
from megatron_opsft.rollout.remote.addresses import Address
from megatron_opsft.rollout.remote.engine_process import EngineProcess
from megatron_opsft.rollout.remote.keys import Keys, derive_keys
from megatron_opsft.rollout.remote.words import Word

log = logging.getLogger("megatron_opsft")

_POLL_MS, _STARTING_POLL_MS = 500, 20
_SAY_SECONDS = 60.0
_DOUBT_SECONDS = 5.0
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 2000, 15000


class _TrainerAlone:
    """Lets in who has the trainer's key; others are refused before a word of theirs is read."""

    def __init__(self, keys: Keys) -> None:
        self._public = keys.trainer.public

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by the authenticator with the public key of whoever wants in."""
        return key == self._public


class EngineHost:
    """Serves until it has been alone for `idle_seconds`."""

    def __init__(self, address: Address, token: str, log_dir: Path, idle_seconds: float) -> None:
        """Errors: `UserError` where the address cannot be had."""
        self._idle_seconds = idle_seconds
        self._log_file = log_dir / f"engine-{address.port}.log"
        self._context = zmq.Context()
        self._guard = ThreadAuthenticator(self._context)
        self._guard.start()
        keys = derive_keys(token)
        self._guard.configure_curve_callback(credentials_provider=_TrainerAlone(keys))
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.curve_server = True
        self._socket.curve_secretkey = keys.host.secret
        self._socket.curve_publickey = keys.host.public
        self._socket.router_mandatory = True
        self._socket.ipv6 = ":" in address.host
        set_heartbeat(self._socket)
        self._monitor = self._socket.get_monitor_socket(
            zmq.Event.DISCONNECTED
            | zmq.Event.HANDSHAKE_FAILED_AUTH
            | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
        )
        self._engine: EngineProcess | None = None
        self._trainer = b""
        self._requests: deque[bytes] = deque()  # until the process is there to hear them
        self._refused = self._doubtful_until = float("-inf")
        try:
            self._socket.bind(f"tcp://{address}")
        except zmq.ZMQError as error:
            self.close()
            raise UserError(
                f"cannot listen at {address}: {error.strerror}; --listen must be a free port of an "
                "address of this machine"
            ) from error

    def serve(self) -> None:
        """Until nobody has come for so long."""
        alone_since = time.monotonic()
        while self._engine is not None or time.monotonic() - alone_since < self._idle_seconds:
            if self._engine is not None:
                alone_since = time.monotonic()
            self._serve_once()
        log.info("no trainer for %.0f s: leaving", self._idle_seconds)

    def _serve_once(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        if self._engine is not None:
            poller.register(self._engine.socket, zmq.POLLIN)
        ready = dict(poller.poll(_STARTING_POLL_MS if self._requests else _POLL_MS))
        if self._monitor in ready:
            self._notice(recv_monitor_message(self._monitor)["event"])
        self._check_trainer()
        if self._socket in ready:
            self._obey(*self._socket.recv_multipart())
        while self._engine is not None and self._requests and self._engine.can_send(0):
            self._engine.send(self._requests.popleft())
        while self._engine is not None and self._engine.poll(0):
            self._tell(self._trainer, Word.REPLY, self._engine.receive())
        if self._engine is not None and (how := self._engine.ended()):
            self._tell(self._trainer, Word.ENDED, f"{how}; {self._engine.last_words()}".encode())
            self._end_engine()

    def _notice(self, event: int) -> None:
        if event != zmq.Event.DISCONNECTED:
            if time.monotonic() - self._refused > _SAY_SECONDS:
                log.warning("refused somebody who does not have the job's token")
            self._refused = time.monotonic()
        else:  # of whom is not said, and the socket itself notices a little later
            self._doubtful_until = time.monotonic() + _DOUBT_SECONDS

    def _check_trainer(self) -> None:
        doubted = self._engine is not None and time.monotonic() < self._doubtful_until
        if doubted and not self._tell(self._trainer, Word.THERE):
            log.info("the trainer is gone")
            self._end_engine()

    def _obey(self, trainer: bytes, *message: bytes) -> None:
        match message:
            case (Word.OPEN, *_) if self._engine is None or trainer == self._trainer:
                self._end_engine()
                self._trainer = trainer
                self._engine = EngineProcess(self._context, self._log_file, devices=())
                log.info("a trainer is there: engine process %d", self._engine.pid)
                self._tell(trainer, Word.OPENED, str(self._engine.pid).encode())
            case (Word.OPEN, *_):
                self._tell(trainer, Word.BUSY)
            case (Word.REQUEST, content) if self._engine and trainer == self._trainer:
                self._requests.append(content)
            case (Word.CLOSE, *_) if self._engine and trainer == self._trainer:
                log.info("the trainer has left")
                self._end_engine()

    def _tell(self, trainer: bytes, word: Word, content: bytes = b"") -> bool:
        """Whether there is a connection to that trainer."""
        try:
            self._socket.send_multipart([trainer, word, content], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def _end_engine(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None
            self._requests.clear()

    def close(self) -> None:
        """End the engine process and let go of the address."""
        self._end_engine()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=500)
        self._guard.stop()
        self._context.term()


def set_heartbeat(socket: Any) -> None:
    """A connection whose other end is silent for some seconds is closed."""
    socket.heartbeat_ivl = HEARTBEAT_MS
    socket.heartbeat_timeout = HEARTBEAT_TIMEOUT_MS
    socket.heartbeat_ttl = HEARTBEAT_TIMEOUT_MS
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = 0
