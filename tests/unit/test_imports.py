"""The layout holds: imports point one way, and each heavy package is named in one place."""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "megatron_opsft"

# The rooms of the package, from the bottom up: folders, and files at its top. A room imports from
# lower lines alone; those of one line do not know each other.
LAYERS: list[list[str]] = [
    ["config_section"],
    ["records", "errors", "callbacks"],
    ["methods"],
    ["config"],
    ["runtime", "architectures"],
    ["report", "command_line"],
    ["data", "weights", "loss", "batching"],
    ["verify", "storage", "rollout"],
    ["model"],
    ["preflight"],
    ["sync", "plan", "evaluate", "convert", "launch"],
    ["study", "diagnose"],
    ["report_command"],
    ["run_input"],
    ["session"],
    ["step"],
    ["make_data"],
    ["run"],
    ["train"],
    ["api"],
    ["cli"],
    ["__main__"],
]

# Package -> the only files (or folders) that may name it.
HOMES = {
    "math_verify": ["verify/comparison.py", "verify/equality.py", "verify/math_verifier.py"],
    "vllm": [
        "rollout/vllm/engine.py",
        "rollout/vllm/options.py",
        "rollout/vllm/cpu_worker.py",
        "rollout/vllm/cpu_kernels.py",
    ],
    "click": ["cli.py", "command_line.py"],
    "ruamel": ["config/yaml_text.py"],
    "datasets": ["data/sources.py"],
    "tensorboard": ["run/metrics.py"],
    "torch.utils.tensorboard": ["run/metrics.py"],
    "wandb": ["run/metrics.py"],
    "triton": ["loss/logit_kernels.py"],
    "megatron": [
        "model/",
        "runtime/",
        "loss/cross_entropy.py",
        "loss/output_head.py",
        "sync/export.py",
    ],
    "torch.distributed": [
        "runtime/",
        "loss/output_head.py",  # the type of a group
        "sync/transfer.py",
        "model/checkpoint.py",
        "model/checkpoint_write.py",
        "sync/export.py",
        "model/checkpoint_share.py",
        "storage/dist_metadata.py",
        "convert/megatron_layout.py",
        "launch/torchrun.py",
    ],
}


@cache
def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@cache
def module_names() -> frozenset[str]:
    return frozenset(module_name(path) for path in files())


@cache
def tree_of(path: Path) -> ast.AST:
    return ast.parse(path.read_text(encoding="utf-8"))


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imports(tree: ast.AST) -> Iterator[str]:
    """Full dotted names of everything a file imports, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(path: Path) -> set[str]:
    """Modules of the package that a file imports, without the package's own name."""
    modules, found = module_names(), set()
    for name in imports(tree_of(path)):
        if name.startswith("megatron_opsft."):
            name = name.removeprefix("megatron_opsft.")
            found.add(name if name in modules else name.rpartition(".")[0])
    return found


def test_every_room_has_its_place() -> None:
    there = {path.name.removesuffix(".py") for path in PACKAGE.iterdir()}
    listed = [room for layer in LAYERS for room in layer]
    assert sorted(listed) == sorted(there - {"__init__", "__pycache__", "assets", "py.typed"})


def test_imports_point_one_way() -> None:
    layer_of = {room: number for number, layer in enumerate(LAYERS) for room in layer}
    wrong = []
    for path in files():
        room, *_ = module_name(path).split(".")
        for name in own_imports(path):
            other, *_ = name.split(".")
            if room and other != room and layer_of[other] >= layer_of[room]:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert wrong == []


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports inside functions count."""
    sorter = TopologicalSorter({module_name(path): own_imports(path) for path in files()})
    sorter.prepare()  # CycleError names the circle


def test_heavy_packages_are_named_only_in_their_homes() -> None:
    wrong = []
    for path in files():
        place = path.relative_to(PACKAGE).as_posix()
        for name in imports(tree_of(path)):
            for package, homes in HOMES.items():
                inside = any(place == home or place.startswith(home) for home in homes)
                if (name == package or name.startswith(package + ".")) and not inside:
                    wrong.append(f"{place} imports {name}")
    assert wrong == []


def cuda_mentions(tree: ast.AST) -> Iterator[int]:
    """Lines with torch.cuda, `.cuda()`, device="cuda..." or torch.device("cuda...")."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "cuda":
            yield node.lineno
        elif isinstance(node, ast.Import | ast.ImportFrom):
            if any(name.startswith("torch.cuda") for name in imports(node)):
                yield node.lineno
        elif isinstance(node, ast.Call):
            placed = [keyword.value for keyword in node.keywords if keyword.arg == "device"]
            called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            if called in ("device", "to"):
                placed += node.args
            for value in placed:
                if isinstance(value, ast.Constant) and str(value.value).startswith("cuda"):
                    yield node.lineno


def test_cuda_is_named_in_runtime_alone() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in files()
        if path.relative_to(PACKAGE).parts[0] != "runtime"
        for line in cuda_mentions(tree_of(path))
    ]
    assert wrong == []


def test_every_way_to_name_cuda_is_seen() -> None:
    for line in (
        "import torch.cuda",
        "from torch import cuda",
        "torch.cuda.synchronize()",
        "x.cuda()",
        "torch.zeros(2, device='cuda')",
        "torch.zeros(2, device='cuda:0')",
        "x.to('cuda')",
        "torch.device('cuda', 0)",
    ):
        assert list(cuda_mentions(ast.parse(line))), line
    assert not list(cuda_mentions(ast.parse("torch.zeros(2, device=device); run.device == 'cuda'")))


def test_records_and_config_do_not_load_torch() -> None:
    named = [PACKAGE / name for name in ("records.py", "errors.py", "data/boxed.py")]
    for path in (*named, *(PACKAGE / "config").glob("*.py")):
        tree = tree_of(path)
        assert isinstance(tree, ast.Module)
        top = {
            module.split(".")[0]
            for node in tree.body
            for module in imports(node)
            if isinstance(node, ast.Import | ast.ImportFrom)
        }
        assert "torch" not in top, path


# Functions that are one list of options.
OPTION_LISTS = {
    "launch/commands.py": "slurm",
    "model/transformer_config.py": "transformer_config",
    "study/commands.py": "study",
}


def test_files_and_functions_are_short() -> None:
    for path in files():
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 300, path
        list_of_options = OPTION_LISTS.get(path.relative_to(PACKAGE).as_posix())
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef) and node.name != list_of_options:
                assert node.end_lineno is not None
                assert node.end_lineno - node.lineno < 60, (path, node.name)
