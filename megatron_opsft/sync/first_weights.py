"""The weights that a run starts from: every rank reads its shards from the model's files, or the
engine alone reads them and the shards are filled from its parameters.

That the engine's parameters are read at the right places is proved before anything is sampled or
trained. Checksums of both sides show that the pull brought what stands at the places of the known
layout; the first push then gives the shards to the engine's own loader, and the checksums after it
are the same only if that puts every weight where the pull had found it.
"""

import logging
import time

from megatron_opsft.model.load import TrainerParts
from megatron_opsft.rollout.engine import RolloutEngine
from megatron_opsft.runtime.distributed import max_over_world
from megatron_opsft.storage.hf_files import HfTensors
from megatron_opsft.sync.weight_sync import WeightSync

log = logging.getLogger("megatron_opsft")


def load_first_weights(parts: TrainerParts, sync: WeightSync, reader: RolloutEngine | None) -> None:
    """Fill every shard and the optimizer's main weights; called by every rank.

    reader: the engine of `sync`, where it may read the files. The log says why it cannot, and how
    the weights came, in how many seconds of the slowest rank.
    Errors: `SyncError` on every rank where the shards are not what the engine holds.
    """
    is_main = parts.shards.layout.is_main
    if reader is not None:
        reason = "the engine cannot read a Megatron checkpoint"
        if isinstance(parts.stored, HfTensors):
            reason = sync.why_not_in_place(reader.layout.uncertain)
        if reason and is_main:
            log.info("the trainer reads the weights from disk itself: %s", reason)
        reader = None if reason else reader
    files = parts.stored.files()
    start, by = time.perf_counter(), "by every rank its own slices"
    if reader is None:
        parts.shards.fill(parts.stored.read)
    else:
        reader.load_files(files, version=0)
        sync.pull()
        by = "by the engine"
    parts.start_main_weights()
    (seconds,) = max_over_world([time.perf_counter() - start])
    if is_main:
        size = sum(file.stat().st_size for file in files) / 1e9
        log.info("weights: %.3g GB of files read in %.1f s %s", size, seconds, by)
