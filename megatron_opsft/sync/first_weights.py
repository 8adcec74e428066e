"""The weights that a run starts from: every rank reads its shards from the model's files, or the
engine alone reads them and the shards are filled from its parameters.

That the engine's parameters are read at the right places is proved before anything is sampled or
trained. Checksums of both sides show that the pull brought what stands at the places of the known
layout; the first push then gives the shards to the engine's own loader, and the checksums after it
are the same only if that puts every weight where the pull had found it.
"""

import logging
import resource
import time

from megatron_opsft.model.load import TrainerParts
from megatron_opsft.rollout.engine import RolloutEngine
from megatron_opsft.runtime.distributed import max_over_world, sum_over_world
from megatron_opsft.storage.hf_files import HfTensors
from megatron_opsft.sync.weight_sync import WeightSync

log = logging.getLogger("megatron_opsft")


def load_first_weights(parts: TrainerParts, sync: WeightSync, reader: RolloutEngine | None) -> None:
    """Fill every shard and the optimizer's main weights; called by every rank.

    reader: the engine of `sync`, where it may read the files. The log says why it cannot, and how
    the weights came: in how many seconds of the slowest rank, and how many bytes all ranks together
    had to fetch from disks; the rest of the files was in the page cache.
    Errors: `SyncError` on every rank where the shards are not what the engine holds.
    """
    say = log.info if parts.shards.layout.is_main else _say_nothing
    if reader is not None and (reason := _why_not(parts, sync)):
        say("the trainer reads the weights from disk itself: %s", reason)
        reader = None
    files = parts.stored.files()
    start, disk_bytes_before, pull_seconds = time.perf_counter(), _disk_bytes_read(), 0.0
    if reader is None:
        parts.shards.fill(parts.stored.read)
    else:
        reader.load_files(files, version=0)
        pull_start = time.perf_counter()
        sync.pull()
        pull_seconds = time.perf_counter() - pull_start
    parts.start_main_weights()
    (disk_bytes,) = sum_over_world([_disk_bytes_read() - disk_bytes_before])
    seconds, pull_seconds = max_over_world([time.perf_counter() - start, pull_seconds])
    by = "by every rank its own slices"
    if reader is not None:
        by = f"by the engine; {pull_seconds:.1f} s of it to fill the trainer's shards"
    say(
        "weights: %.3g GB of files (%.3g GB fetched from disks) read in %.1f s %s",
        sum(file.stat().st_size for file in files) / 1e9,
        disk_bytes / 1e9,
        seconds,
        by,
    )


def _disk_bytes_read() -> int:
    """Bytes fetched for this process since it started, mapped files included (Linux)."""
    block_bytes = 512
    return resource.getrusage(resource.RUSAGE_SELF).ru_inblock * block_bytes


def _why_not(parts: TrainerParts, sync: WeightSync) -> str:
    """Why the shards cannot come from the engine, the same on every rank; "" where they can."""
    if not isinstance(parts.stored, HfTensors):
        return "the engine cannot read a Megatron checkpoint"
    return sync.why_unreadable()


def _say_nothing(*message: object) -> None:
    """Rank 0 says it."""
