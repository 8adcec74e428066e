"""megatron_opsft: on-policy SFT for shorter reasoning, on Megatron-Core.

`import megatron_opsft` costs nothing: its functions are imported on first use, and `__init__.pyi`
tells type checkers what they are.
"""

import importlib
import sys
import warnings

__all__ = ["Callback", "TrainedRun", "convert", "evaluate", "load_config", "train"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("megatron_opsft.commands.api"), name)


# Megatron says it of every module it falls back in; a run says once what its layers are made of.
warnings.filterwarnings(
    "ignore", "(Transformer Engine and )?Apex (is|are) not installed"
)
if not sys.warnoptions:
    # Megatron and torch warn of their own code, on every rank: nothing that a user can fix.
    warnings.filterwarnings("ignore", module=r"megatron\.core\.")
    warnings.filterwarnings("ignore", module=r"torch\.distributed\.")
