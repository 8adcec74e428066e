"""TransformerEngine's C++ extension on a pretended GPU: what its Python modules call, in torch.

Each stand-in takes what the real function takes, by the signature that pybind11 wrote into its
docstring; a function without one is a `Fault`. Products and sums are in float32, results in the
dtype that was asked for. Sequences are packed ("thd"), masks causal.
"""

import collections.abc
import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

import torch

from pretend_gpu import te_attention, te_kernels
from pretend_gpu.marks import Fault

# They ask nothing of a GPU.
_REAL = {"get_cudnn_version", "get_cublasLt_version", "get_num_cublas_streams"}
_SHORTER = {"typing.SupportsInt | typing.SupportsIndex": "typing.SupportsIndex"}
Stand = Callable[..., Any]


def load_plugins() -> None:
    """Make the extension's functions stand-ins, in this process for good. TransformerEngine calls
    this when it has loaded the extension: NVTE_PLUGIN names this module.
    """
    extension = sys.modules["transformer_engine_torch"]
    for name, real in list(vars(extension).items()):
        if isinstance(real, types.BuiltinFunctionType) and name not in _REAL:
            known = getattr(te_kernels, name, getattr(te_attention, name, None))
            missing = functools.partial(_missing, name)
            setattr(extension, name, bound(known, real, extension) if known else missing)


def _missing(name: str, *args: Any, **kwargs: Any) -> None:
    raise Fault(f"transformer_engine_torch.{name} has no stand-in")


def bound(stand_in: Stand, real: Any, extension: Any) -> Stand:
    """The stand-in, which now takes what the real function takes: else a TypeError."""
    signature = _signature(real, extension)

    @functools.wraps(real)
    def called(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        for name, value in call.arguments.items():
            parameter = signature.parameters[name]
            if value is not parameter.default and not _is_one(value, parameter.annotation):
                raise TypeError(f"{real.__name__}: {value!r} is no {parameter}")
        return stand_in(*call.arguments.values())

    return called


def _signature(real: Any, extension: Any) -> inspect.Signature:
    """As the docstring says it. Arguments without a name have none: they are positional."""
    line = real.__doc__.splitlines()[0]
    for long, short in _SHORTER.items():
        line = line.replace(long, short)
    space = {"torch": torch, "typing": typing, "collections": collections}
    space |= {"transformer_engine_torch": extension, "DType": typing.SupportsIndex}
    exec(f"def {line}: ...", space)
    signature = inspect.signature(space[real.__name__])  # type: ignore[arg-type]
    positional = inspect.Parameter.POSITIONAL_ONLY
    return signature.replace(
        parameters=[
            each.replace(kind=positional) if each.name.startswith("arg") else each
            for each in signature.parameters.values()
        ]
    )


def _is_one(value: Any, kind: Any) -> bool:
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return any(_is_one(value, each) for each in typing.get_args(kind))
    if (origin := typing.get_origin(kind)) is not None:
        inner = typing.get_args(kind)[0]
        return isinstance(value, origin) and all(_is_one(each, inner) for each in value)
    if value is None:
        return kind in (None, types.NoneType, bool, object)  # pybind11 takes None for False
    return isinstance(value, kind)
