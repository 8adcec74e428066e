"""Several jobs in one process, one after another: a script that trains, evaluates, trains again.

Imports no torch: `train` checks a run before it loads anything.
"""

import gc
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_opsft.errors import UserError, first_line
from megatron_opsft.runtime.launched import num_starts
from megatron_opsft.runtime.watchdog import abandon_watch, report_failure


@contextmanager
def ended_with_its_job() -> Iterator[None]:
    """Inside, at most one job is started. After an error that all ranks have, nothing of it is left
    in this process; where one rank fails alone, the processes of the others end.
    """
    before = num_starts()
    try:
        yield
    except BaseException as error:
        if isinstance(error, UserError) and error.args:
            error.args = (_in_python(str(error)), *error.args[1:])
        if num_starts() > before:
            _abandon_job(first_line(error))
        elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
            from megatron_opsft.runtime.job import refuse_start

            refuse_start(first_line(error))
        _let_go(error)
        raise


def _in_python(text: str) -> str:
    """An error of the command line in the words of the functions: `--resume=auto` is
    `resume="auto"`, and `--overwrite` is `overwrite=True`.
    """
    text = re.sub(r"--(resume)=(\w+)", r'\1="\2"', text)
    return re.sub(r"--(resume|overwrite)\b", r"\1=True", text)


def _abandon_job(reason: str) -> None:
    """Leave the watch and all groups, of which the job may have left some already."""
    import torch.distributed as dist

    from megatron_opsft.runtime.job import all_abandon, leave_job

    if dist.is_initialized() and not all_abandon():
        report_failure(1, reason)
    abandon_watch()
    if (
        "megatron.core.parallel_state" in sys.modules
    ):  # an evaluation does without Megatron
        from megatron_opsft.runtime.distributed import stop_distributed

        stop_distributed()
    else:
        leave_job()


def _let_go(error: BaseException | None) -> None:
    """Free the models, threads and process groups that the error's frames hold."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    gc.collect()
