"""The judges by name, as a worker process loads them: the shipped ones, and a user's function."""

import json
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from megatron_opsft.errors import UserError, first_line
from megatron_opsft.records import Outcome, Verdict
from megatron_opsft.verify.answer import make_verdict

Judge = Callable[..., Verdict]


def open_judge(names: str) -> Judge:
    """The judge of that name, ready to be timed; of several names, `a,b,c`, one that is told each
    answer's.

    A shipped judge takes (text, gold); a user's (text, gold, fields as JSON); of several
    (text, gold, fields, name). Errors: `UserError` for a user's that cannot be imported.
    """
    if "," not in names:
        return _load(names)
    judges = {name: _load(name) for name in names.split(",")}

    def judge(text: str, gold: str, fields: str, name: str) -> Verdict:
        return judges[name](text, gold, fields) if ":" in name else judges[name](text, gold)

    return judge


def _load(name: str) -> Judge:
    if ":" in name:
        return _guarded(_import_function(name))
    if name == "math":  # alone imports sympy, which the others do not wait for
        from megatron_opsft.verify.math_verifier import judge

        judge(r"\boxed{\frac{1}{2}}", "0.5")  # compiles patterns and tables before any clock runs
        return judge
    from megatron_opsft.verify.text_judges import TEXT_JUDGES

    return TEXT_JUDGES[name]


def _import_function(name: str) -> Callable[..., Any]:
    """`package.module:function`, of Python's path or the working directory."""
    module_name, _, function_name = name.partition(":")
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)  # last: nothing that lies there hides a package
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's code: whatever it breaks is said
        raise UserError(
            f"judge {name}: {module_name} cannot be imported ({first_line(error)}); it is looked "
            f"for in {here} and where Python finds modules (PYTHONPATH)"
        ) from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UserError(
            f"judge {name}: {module.__file__} has no function {function_name}; write "
            "package.module:function"
        )
    return function


def _guarded(function: Callable[..., Any]) -> Judge:
    """A user's function with every answer an outcome: an exception is ERROR, but for MemoryError,
    which is perhaps of earlier answers: another process judges this one.
    """

    def judge(text: str, gold: str, fields: str = "{}") -> Verdict:
        try:
            return _as_verdict(function(text, gold, json.loads(fields)))
        except MemoryError:
            raise
        except Exception as error:
            return make_verdict(Outcome.ERROR, first_line(error))

    return judge


def _as_verdict(value: object) -> Verdict:
    if isinstance(value, Verdict):
        return make_verdict(value.outcome, str(value.answer))
    if isinstance(value, Outcome):
        return make_verdict(value)
    if isinstance(value, bool):
        return make_verdict(Outcome.CORRECT if value else Outcome.WRONG)
    what = f"it returned {type(value).__name__}, not a bool, an Outcome or a Verdict"
    return make_verdict(Outcome.ERROR, what)
