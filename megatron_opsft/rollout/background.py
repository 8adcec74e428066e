"""A batch that is sampled while this rank does other things."""

from queue import Empty, SimpleQueue
from threading import Thread

from megatron_opsft.records import Rollout
from megatron_opsft.rollout.dealing import WorkQueue
from megatron_opsft.rollout.engine import BackgroundEngine, SamplingSettings


class BackgroundSampling:
    """What this rank's engines make, as it ends; made by every rank."""

    def __init__(
        self, engine: BackgroundEngine, work: WorkQueue, settings: SamplingSettings
    ) -> None:
        """Begins at once."""
        self._engine, self._work, self._settings = engine, work, settings
        self._ended: SimpleQueue[list[Rollout]] = SimpleQueue()
        self._error: BaseException | None = None
        self._thread = self._start()

    def _start(self) -> Thread:
        thread = Thread(target=self._run, name="rollouts", daemon=True)
        thread.start()
        return thread

    def _run(self) -> None:
        try:
            for rollouts in self._engine.stream_once(self._work.take, self._settings):
                if rollouts:
                    self._ended.put(rollouts)
        except BaseException as error:  # for the thread that asks
            self._error = error
        self._ended.put([])  # wakes it

    def take(self, seconds: float) -> tuple[list[Rollout], bool]:
        """What has ended since the last call, and whether that was all that comes before `recover`;
        waits for at most so long. Errors: what the engine raised.
        """
        found: list[Rollout] = []
        is_through = not self._thread.is_alive()
        try:
            found += self._ended.get(timeout=0 if is_through else seconds)
            while True:
                found += self._ended.get_nowait()
        except Empty:
            pass
        if self._error is not None:
            raise self._error
        return found, is_through

    def recover(self) -> bool:
        """Whether there is more to come, since an engine has died and another one goes on for it.
        Called by every rank when all are through.
        """
        if not self._engine.recover():
            self._work.forget()
            return False
        self._thread = self._start()
        return True
