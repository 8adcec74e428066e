"""Rules of the house that no linter knows: lengths, and who names devices and process groups.

Rooms and what each may import: `[tool.importlinter]` in pyproject.toml. `torch.cuda`: ruff.
"""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "megatron_opsft"
FILES = {p.relative_to(PACKAGE).as_posix(): p.read_text("utf-8") for p in PACKAGE.rglob("*.py")}
TREES = {place: ast.parse(text) for place, text in FILES.items()}
# Parts of torch and the rooms that may name them.
HOMES = {
    "torch.distributed": (
        "commands/convert",
        "commands/launch",
        "models/storage",
        "run/sync",
        "runtime",
        "trainer/loss",
        "trainer/model",
    ),
    "torch.utils.tensorboard": ("run/record",),
}
# Functions that are one list of options.
OPTION_LISTS = {
    "commands/launch/commands.py": "slurm",
    "trainer/model/transformer_config.py": "transformer_config",
    "commands/study/commands.py": "study",
}


def test_files_and_functions_are_short() -> None:
    for place, tree in TREES.items():
        assert len(FILES[place].splitlines()) <= 360, place
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name != OPTION_LISTS.get(place):
                assert node.end_lineno is not None
                assert node.end_lineno - node.lineno < 60, (place, node.name)


def imported(node: ast.AST) -> list[str]:
    """Dotted names of what a line imports."""
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def test_parts_of_torch_are_imported_in_their_rooms_alone() -> None:
    wrong = [
        f"{place} imports {name}"
        for place, tree in TREES.items()
        for node in ast.walk(tree)
        for name in imported(node)
        for part, rooms in HOMES.items()
        if f"{name}.".startswith(f"{part}.") and not place.startswith(rooms)
    ]
    assert wrong == []


def names_cuda(node: ast.AST) -> bool:
    """torch.cuda, `.cuda()`, device="cuda..." or torch.device("cuda...")."""
    if not isinstance(node, ast.Call):
        return isinstance(node, ast.Attribute) and node.attr == "cuda"
    placed = [keyword.value for keyword in node.keywords if keyword.arg == "device"]
    if isinstance(node.func, ast.Attribute) and node.func.attr in ("device", "to"):
        placed += node.args
    constants = [str(value.value) for value in placed if isinstance(value, ast.Constant)]
    return any(text.startswith("cuda") for text in constants)


def test_cuda_is_named_in_runtime_alone() -> None:
    others = [place for place in TREES if not place.startswith("runtime/")]
    assert [p for p in others if any(map(names_cuda, ast.walk(TREES[p])))] == []


def test_the_terminal_is_written_to_in_one_place() -> None:
    """`say` knows what a stream can show. What prints is found by ruff (T20)."""
    streams = ("sys.stdout", "sys.stderr", "click.echo")
    others = [place for place in FILES if not place.startswith("runtime/")]
    assert [p for p in others if any(stream in FILES[p] for stream in streams)] == []
