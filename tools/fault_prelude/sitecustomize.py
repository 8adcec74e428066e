"""Python imports this file first in every process of a run under tools/random_faults.py.

In a training rank it makes the hidden states of one micro-batch not numbers, or its loss never
return, when a file `nan` or `stuck` appears in the directory OPSFT_FAULTS; the rank that takes the
file is the one.
"""

import builtins
import os
import sys
import time
from pathlib import Path
from typing import Any

_import = builtins.__import__
_NAME = "megatron_opsft.trainer.model.step"


def _taken(fault: str) -> bool:
    try:
        (Path(os.environ["OPSFT_FAULTS"]) / fault).unlink()
    except FileNotFoundError:
        return False
    return True


def _spoil(step: Any) -> None:
    losses = step.sum_losses

    def spoilt(*args: Any) -> Any:
        if _taken("stuck"):
            while True:
                time.sleep(1)
        *others, hidden = args
        return losses(*others, hidden * float("nan") if _taken("nan") else hidden)

    step.sum_losses = spoilt


def _watching_import(*args: Any, **kwargs: Any) -> Any:
    module = _import(*args, **kwargs)
    step = sys.modules.get(_NAME)
    if step is not None and hasattr(step, "Trainer"):
        builtins.__import__ = _import
        _spoil(step)
    return module


if "OPSFT_FAULTS" in os.environ:
    builtins.__import__ = _watching_import
