"""Which failures are worth another start. slurm/common.sh keeps the same rules."""

import logging
from collections.abc import Callable

from megatron_opsft.runtime.stop_signal import REQUEUE_EXIT_CODE

log = logging.getLogger("megatron_opsft")

# Wrong input and a loss that is not finite: they would only come again.
FINAL_EXIT_CODES = (2, 3)


def run_with_restarts(start: Callable[[bool], int], max_restarts: int) -> int:
    """Call `start(again)` until it is done, at most 1 + `max_restarts` times; its last exit code.

    again: False for the first start, True for those that continue from the newest checkpoint. Done
    is 0, 75 (stopped as asked: whoever asked decides when to continue) and `FINAL_EXIT_CODES`.
    """
    code = start(False)
    for restart in range(1, max_restarts + 1):
        if code in (0, REQUEUE_EXIT_CODE, *FINAL_EXIT_CODES):
            return code
        log.warning(
            "a rank ended with exit code %d; restart %d of %d, from the newest checkpoint",
            code,
            restart,
            max_restarts,
        )
        code = start(True)
    return code
