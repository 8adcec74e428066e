"""Cleans up after a job, so that a script can start several: train, evaluate, train again.

Imports no torch: `train` checks a run before it loads anything.
"""

import gc
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_opsft.errors import UserError, causes, first_line
from megatron_opsft.runtime.launched import launched_ranks, num_starts
from megatron_opsft.runtime.watchdog import abandon_watch, report_failure


@contextmanager
def ended_with_its_job() -> Iterator[None]:
    """Leave the job that was started inside the block, if an error ends it. At most one is started.

    After an error that all ranks have, nothing of the job remains in this process. If one rank
    fails alone, the processes of the others end.
    """
    before = num_starts()
    try:
        yield
    except BaseException as error:
        if isinstance(error, UserError) and error.args:
            error.args = (_in_python(str(error)), *error.args[1:])
        if num_starts() > before:
            _abandon_job(first_line(error))
        elif launched_ranks() > 1:
            from megatron_opsft.runtime.job import refuse_start

            refuse_start(first_line(error))
        _free_frames(error)
        raise


def _in_python(text: str) -> str:
    """Rewrite options of the command line as arguments: `--resume=auto` as `resume="auto"`, and
    `--overwrite` as `overwrite=True`.
    """
    text = re.sub(r"--(resume)=(\w+)", r'\1="\2"', text)
    return re.sub(r"--(resume|overwrite)\b", r"\1=True", text)


def _abandon_job(reason: str) -> None:
    """Leave the watchdog and all process groups, some of which may be left already."""
    import torch.distributed as dist

    from megatron_opsft.runtime.job import all_abandon, leave_job

    if dist.is_initialized() and not all_abandon():
        report_failure(1, reason)
    abandon_watch()
    if "megatron.core.parallel_state" in sys.modules:
        from megatron_opsft.runtime.distributed import stop_distributed

        stop_distributed()
    else:  # an evaluation does not load Megatron
        leave_job()


def _free_frames(error: BaseException) -> None:
    """Free the models, threads and process groups that the error's frames refer to."""
    for cause in causes(error):
        traceback.clear_frames(cause.__traceback__)
    gc.collect()
