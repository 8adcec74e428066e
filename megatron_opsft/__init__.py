"""megatron_opsft: on-policy SFT for shorter reasoning, on Megatron-Core.

`import megatron_opsft` costs nothing: its functions are imported on first use, and `__init__.pyi`
tells type checkers what they are.
"""

import importlib
import inspect
import sys
import warnings
from types import ModuleType
from typing import Any

__all__ = ["Callback", "TrainedRun", "convert", "evaluate", "load_config", "train"]
__version__ = "0.1.0"


class _Function(ModuleType):
    """A module that has the name of a function: calling it calls the function."""

    def __call__(self, *args: object, **named: object) -> object:
        return _function(self.__name__.rpartition(".")[2])(*args, **named)

    @property
    def __signature__(self) -> object:
        return inspect.signature(_function(self.__name__.rpartition(".")[2]))


def _function(name: str) -> Any:
    return getattr(importlib.import_module("megatron_opsft.api"), name)


class _Package(ModuleType):
    """Some of the functions have the name of a module, which an import puts in their place."""

    def __getattr__(self, name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return _function(name)

    def __setattr__(self, name: str, value: object) -> None:
        if name in __all__ and isinstance(value, ModuleType):
            value.__class__ = _Function
        super().__setattr__(name, value)


# Megatron says it of every module it falls back in; a run says once what its layers are made of.
warnings.filterwarnings("ignore", "(Transformer Engine and )?Apex (is|are) not installed")
sys.modules[__name__].__class__ = _Package
