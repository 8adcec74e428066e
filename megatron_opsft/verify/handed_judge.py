"""A judge that a script or a notebook hands over in Python: a function, also a lambda.

One that Python finds in a module is named as on the command line. Any other is pickled, by
cloudpickle, into a module of its own beside what it judges: `judge_<hash of its code>.py`. From
there on it is a judge like any other, `judge_<hash>:judge`, in every process and after a restart.
"""

import dis
import hashlib
import json
import re
import sys
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from textwrap import fill
from types import CodeType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any, NamedTuple

from megatron_opsft.data.handed import write_once
from megatron_opsft.errors import UserError, first_line
from megatron_opsft.section import check_judge_name

_HANDED = re.compile(r"(judge_[0-9a-f]{16}):judge")
_MODULE = '''"""A judge that was handed over in Python (docs/convert.md), pickled by cloudpickle."""

import pickle
import sys
from base64 import b64decode

if sys.version_info[:2] != {version}:
    raise ImportError("the judge was pickled by Python %d.%d, and only that reads it" % {version})
judge = pickle.loads(
    b64decode(
        """
{pickle}
"""
    )
)
'''


class PackedJudge(NamedTuple):
    """A judge that was handed over, and how other processes get it."""

    name: str
    """`module:function`, as a configuration names a judge."""
    module: bytes
    """The text of the module; empty if that is one of the user's."""

    def write(self, directory: Path) -> None:
        """Write the module, if it needs one. Every rank may call it at the same time."""
        if self.module:
            module_name = self.name.partition(":")[0]
            write_once(directory / f"{module_name}.py", self.module)


def pack_judge(judge: object, *, where: str) -> PackedJudge:
    """Name a judge, and pickle it into the text of a module unless it is in one already.

    judge: a function of (response text, gold answer, columns of the row), or a judge's name, as a
    configuration has it. where: the argument, for errors. Errors: `UserError` for another name, and
    for what cannot be called or pickled.
    """
    if isinstance(judge, str):
        try:
            return PackedJudge(name=check_judge_name(judge), module=b"")
        except ValueError as error:
            raise UserError(f"{where}: {error}") from None
    if not callable(judge):
        raise UserError(
            f"{where} is of type {type(judge).__name__}, not a function of (text, gold, fields)"
        )
    if name := _importable_name(judge):
        return PackedJudge(name=name, module=b"")
    import cloudpickle  # only here: other judges do without

    try:
        content = cloudpickle.dumps(judge)
        code = json.dumps(_code_of(judge))
    except Exception as error:  # whatever the judge refers to may raise
        raise UserError(
            f"{where} cannot be pickled ({first_line(error)}): let it refer to functions, modules "
            "and plain values alone, or write it into a module of its own"
        ) from None
    version = tuple(sys.version_info[:2])
    digest = hashlib.sha256(f"{version} {code}".encode()).hexdigest()[:16]
    text = fill(b64encode(content).decode(), 88)
    module = _MODULE.format(version=version, pickle=text)
    return PackedJudge(name=f"judge_{digest}:judge", module=module.encode())


def is_handed(name: str) -> bool:
    """True for the name of a judge that was pickled; it has the hash of the judge's code."""
    return _HANDED.fullmatch(name) is not None


def make_handed_judge_importable(name: str, *directories: Path) -> None:
    """Append to sys.path each directory that holds the module of a judge that was handed over in
    Python. The verifier's workers, which start with the sys.path of this process, import it too.

    name: of a judge. Nothing changes for a judge that was not handed over.
    """
    match = _HANDED.fullmatch(name)
    if match is None:
        return
    for directory in directories:
        place = str(directory.absolute())
        if (directory / f"{match[1]}.py").is_file() and place not in sys.path:
            sys.path.append(place)  # last: nothing that lies there hides a package


def _importable_name(judge: Any) -> str:
    """Return `module:function` of a function that any process can import; "" of another one."""
    if not isinstance(judge, FunctionType) or not _is_of_a_module(judge):
        return ""
    name = f"{judge.__module__}:{judge.__qualname__}"
    return "" if "." in judge.__qualname__ else name


def _is_of_a_module(value: Any) -> bool:
    """True for a function or a class that a pickle names, as other processes can import it."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    name = getattr(value, "__qualname__", None)
    if module is None or name is None or module.__name__ == "__main__":
        return False
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is value


def _code_of(value: Any, above: frozenset[int] = frozenset()) -> Any:
    """Return, as JSON, what decides how a value behaves: the same in every process. A pickle is
    not, as it has file names, line numbers, and sets in any order.

    What other processes can import is its name alone. above: ids of the values that hold this one.
    Errors: `TypeError` for a value that cannot be pickled, and whatever its own code raises.
    """
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    if isinstance(value, ModuleType):
        return value.__name__
    if _is_of_a_module(value):
        return f"{value.__module__}:{value.__qualname__}"
    if id(value) in above:
        return "itself"
    above |= {id(value)}
    parts = [_code_of(part, above) for part in _parts_of(value)]
    if isinstance(value, set | frozenset):
        parts.sort(key=json.dumps)
    return [type(value).__name__, parts]


def _parts_of(value: Any) -> list[Any]:
    """Return the values that decide how a value behaves: of a function its bytecode, its defaults
    and attributes, what it encloses, and the globals that it reads.
    """
    if isinstance(value, CodeType):
        names = [value.co_names, value.co_varnames]
        names += [value.co_freevars, value.co_cellvars]
        counts = [value.co_argcount, value.co_kwonlyargcount, value.co_flags]
        return [value.co_code, value.co_exceptiontable, value.co_consts, names, counts]
    if isinstance(value, FunctionType):
        enclosed = [cell.cell_contents for cell in value.__closure__ or ()]
        own = [value.__defaults__, value.__kwdefaults__, value.__dict__]
        return [value.__code__, own, enclosed, _globals_of(value)]
    if isinstance(value, type):
        return [value.__qualname__, value.__bases__, _members_of(value)]
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    from cloudpickle import Pickler

    reduce = Pickler.dispatch_table.get(type(value))
    reduced = value.__reduce_ex__(4) if reduce is None else reduce(value)
    if isinstance(reduced, str):
        return [reduced]
    return [list(part) if isinstance(part, Iterator) else part for part in reduced]


def _globals_of(function: FunctionType) -> dict[str, Any]:
    """Return the globals that a function and those inside of it read, by name."""
    names: dict[str, None] = {}
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        for instruction in dis.get_instructions(code):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                names[instruction.argval] = None
        codes += [const for const in code.co_consts if isinstance(const, CodeType)]
    known = function.__globals__
    return {name: known[name] for name in names if name in known}


def _members_of(kind: type) -> dict[str, Any]:
    """Return what a class defines, by name; of what Python itself adds only the functions."""
    members = {}
    for name, member in vars(kind).items():
        is_of_python = name.startswith("__") or isinstance(member, MemberDescriptorType)
        if isinstance(member, FunctionType) or not is_of_python:
            members[name] = member
    return members
