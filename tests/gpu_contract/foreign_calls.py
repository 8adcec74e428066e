"""What a source file asks of other packages: found in its syntax tree, bound to the real objects.

A name is followed from its import; what is called on an instance has to be named by the caller
(`tests/gpu_contract/instance_calls.py`), since the source does not say what it is.
"""

import ast
import builtins
import importlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

BOUND = ("vllm", "megatron", "transformer_engine", "triton", "torch")


@dataclass(frozen=True, slots=True)
class Call:
    """line: of the source; called: the function as the source writes it, without arguments."""

    line: int
    called: str
    node: ast.Call


class Source:
    """One file: its imports, definitions and calls."""

    def __init__(self, text: str) -> None:
        self.tree = ast.parse(text)

    @classmethod
    def of(cls, path: Path) -> "Source":
        return cls(path.read_text(encoding="utf-8"))

    @cached_property
    def imported(self) -> dict[str, str]:
        """Local name -> dotted name of everything that is imported, wherever in the file."""
        names: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.split(".")[0]
                    names[alias.asname or top] = alias.name if alias.asname else top
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        return names

    @property
    def modules(self) -> Iterator[str]:
        """Dotted names of what is imported, as the imports say them."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)

    @cached_property
    def defined(self) -> set[str]:
        """Names of the functions and classes of the file, at any depth, and methods as `self.`."""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        names = {node.name for node in ast.walk(self.tree) if isinstance(node, kinds)}
        methods = {
            f"self.{member.name}"
            for node in ast.walk(self.tree)
            if isinstance(node, ast.ClassDef)
            for member in node.body
            if isinstance(member, ast.FunctionDef)
        }
        return names | methods

    @property
    def calls(self) -> Iterator[Call]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                yield Call(node.lineno, ast.unparse(node.func), node)

    @property
    def classes(self) -> Iterator[tuple[ast.ClassDef, list[str]]]:
        """Every class, and the dotted names of its imported bases."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ClassDef):
                plain = [b.value if isinstance(b, ast.Subscript) else b for b in node.bases]
                yield node, [name for base in plain if (name := self.dotted(base))]

    def dotted(self, node: ast.AST) -> str | None:
        """The dotted name behind `a.b.c` where `a` was imported."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self.imported:
            return None
        return ".".join([self.imported[node.id], *reversed(parts)])

    @property
    def mentions(self) -> Iterator[tuple[int, str]]:
        """Line and dotted name of everything of `BOUND` that the file names, imports included."""
        for node in ast.walk(self.tree):
            name = self.dotted(node) if isinstance(node, ast.Attribute | ast.Name) else None
            if name and is_bound(name):
                yield node.lineno, name  # type: ignore[attr-defined]
        yield from ((0, name) for name in self.modules if is_bound(name))


def is_bound(name: str) -> bool:
    """Whether a dotted name belongs to a package whose calls are bound."""
    return name.split(".")[0] in BOUND


def find(name: str) -> Any:
    """The object behind a dotted name. AttributeError or ImportError where there is none."""
    parts = name.split(".")
    found: Any = importlib.import_module(parts[0])
    for number, part in enumerate(parts[1:], 2):
        try:
            found = getattr(found, part)
        except AttributeError:
            if not isinstance(found, ModuleType):
                raise
            found = importlib.import_module(".".join(parts[:number]))
    return found


def mismatch(call: ast.Call, name: str) -> str:
    """Why the real object of this name would not take these arguments; "" where it would.

    Positional arguments are counted and keywords named; what a starred argument adds cannot be seen
    here.
    """
    target, method = find(name), False
    if "." in name:
        owner = find(name.rpartition(".")[0])
        # Looked up on a class, and called on an instance, which comes first.
        method = inspect.isclass(owner) and inspect.isroutine(target)
        method = method and not isinstance(
            inspect.getattr_static(owner, name.rpartition(".")[2]), classmethod | staticmethod
        )
    try:
        signature = inspect.signature(target)
    except ValueError:  # built in
        return ""
    starred = [isinstance(a, ast.Starred) for a in call.args]
    partial = any(starred) or any(keyword.arg is None for keyword in call.keywords)
    # What comes before a starred argument has its place.
    num_args = starred.index(True) if any(starred) else len(starred)
    bind = signature.bind_partial if partial else signature.bind
    keywords = {keyword.arg: object() for keyword in call.keywords if keyword.arg}
    try:
        bind(*[object()] * (num_args + method), **keywords)
    except TypeError as error:
        return str(error)
    return ""


def described(call: ast.Call) -> str:
    """The arguments of a call, as far as they are bound: `2, device=, **`."""
    positional = sum(not isinstance(a, ast.Starred) for a in call.args)
    parts = [str(positional)] if positional else []
    parts += ["*"] if positional < len(call.args) else []
    parts += [f"{keyword.arg}=" if keyword.arg else "**" for keyword in call.keywords]
    return ", ".join(parts)


def check_mentions(source: Source) -> list[str]:
    """Names of other packages that are not there."""
    problems = []
    for line, name in source.mentions:
        try:
            find(name)
        except (AttributeError, ImportError) as error:
            problems.append(f"line {line}: {name}: {error}")
    return problems


def imported_calls(source: Source) -> Iterator[tuple[Call, str]]:
    """Every call of an imported function or class of `BOUND`, with its dotted name."""
    for call in source.calls:
        name = source.dotted(call.node.func)
        if name and is_bound(name):
            yield call, name


def unnamed_calls(
    source: Source, named: Mapping[str, str | tuple[str, ...]], plain: frozenset[str]
) -> list[str]:
    """Calls of which nothing says what is called.

    named: calls on instances that are, with what they reach; plain: methods of Python's own objects
    and of tensors, which need no name but where the object is another package's.
    """
    unknown = []
    foreign = {name.rpartition(".")[0] for name, found in named.items() if _is_foreign(found)}
    for call in source.calls:
        func = call.node.func
        if call.called in named or source.dotted(func):
            continue
        if isinstance(func, ast.Name):
            known = func.id in source.defined or hasattr(builtins, func.id)
        elif isinstance(func, ast.Attribute):
            own = call.called in source.defined or call.called.startswith("super().")
            known = own or (func.attr in plain and not _is_of(call.called, foreign - {"", "self"}))
        else:
            known = isinstance(func, ast.Subscript) and ast.unparse(func.value) in source.defined
        if not known:
            unknown.append(f"line {call.line}: {call.called}({described(call.node)})")
    return unknown


def _is_foreign(found: str | tuple[str, ...]) -> bool:
    names = (found,) if isinstance(found, str) else found
    return any(is_bound(name) and not name.startswith("torch.") for name in names)


def _is_of(called: str, receivers: set[str]) -> bool:
    """Whether a call is one on these receivers or on what they hold."""
    return any(called.startswith(f"{receiver}.") for receiver in receivers)


def override_problems(node: ast.ClassDef, base: type) -> list[str]:
    """Methods of a class that could not be called as its base's are, and abstract ones it lacks."""
    own = {m.name: m for m in node.body if isinstance(m, ast.FunctionDef)}
    missing: set[str] = set(getattr(base, "__abstractmethods__", ())) - own.keys()
    problems = [f"{node.name} lacks {base.__name__}.{name}" for name in sorted(missing)]
    for name, method in own.items():
        theirs = getattr(base, name, None)
        if theirs is None or name.startswith("__"):
            continue
        wanted = list(inspect.signature(theirs).parameters.values())[1:]
        names = {a.arg for a in [*method.args.args[1:], *method.args.kwonlyargs]}
        if method.args.kwarg is None:
            problems += [
                f"{node.name}.{name} does not take {p.name}, as {base.__name__}'s does"
                for p in wanted
                if p.name not in names and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
            ]
    return problems
