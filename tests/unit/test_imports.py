"""The layout holds: imports point one way, and each heavy package is named in one place."""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "megatron_opsft"

# From the bottom up. A module belongs to its longest prefix here; it may import from its own entry
# and from lower layers, not from another entry of its own layer.
LAYERS: list[list[str]] = [
    ["records", "config", "errors", "boxed"],
    ["config_file"],
    ["runtime"],
    ["data", "verify", "objective", "weights"],
    ["rollout", "weights.shards"],
    ["model"],
    ["weights.export", "weights.pull"],
    ["weights.sync"],
    ["report"],
    ["evaluate", "convert", "launch", "diagnose", "plan"],
    ["session"],
    ["journal"],
    ["train"],
    ["cli"],
    ["__main__"],
]

# Package -> the only files (or folders) that may name it.
HOMES = {
    "math_verify": ["verify/math_verifier.py"],
    "vllm": [
        "rollout/vllm_core.py",
        "rollout/vllm_worker.py",
        "rollout/vllm_cpu_worker.py",
    ],
    "zmq": ["rollout/engine_client.py", "rollout/engine_process.py"],
    "typer": [
        "cli.py",
        "convert/commands.py",
        "evaluate/commands.py",
        "launch/commands.py",
        "plan/commands.py",
        "plan/options.py",
        "plan/scaling/commands.py",
    ],
    "datasets": ["data/sources.py"],
    "tensorboard": ["runtime/metrics.py"],
    "torch.utils.tensorboard": ["runtime/metrics.py"],
    "wandb": ["runtime/metrics.py"],
    "matplotlib": ["report/"],
    "triton": ["objective/logit_kernels.py"],
    "megatron": [
        "model/",
        "runtime/",
        "objective/cross_entropy.py",
        "objective/output_head.py",
        "weights/shards.py",
        "weights/export.py",
        "weights/sync.py",
    ],
    "torch.distributed": [
        "runtime/",
        "plan/ranks.py",
        "objective/output_head.py",  # the type of a group
        "model/checkpoint.py",
        "model/checkpoint_write.py",
        "weights/export.py",
        "weights/transfer.py",
        "weights/dist_metadata.py",
        "convert/layout.py",
        "launch/torchrun.py",
    ],
}


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


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


def entry_of(module: str) -> tuple[int, str]:
    """(layer, entry) of a module of the package, without the package's own name."""
    found = [
        (number, entry)
        for number, layer in enumerate(LAYERS)
        for entry in layer
        if module == entry or module.startswith(entry + ".")
    ]
    assert found, f"megatron_opsft.{module} has no place in LAYERS: give it one"
    return max(found, key=lambda pair: len(pair[1]))


def test_imports_point_one_way() -> None:
    wrong = []
    for path in files():
        module = module_name(path)
        if not module:
            continue
        layer, entry = entry_of(module)
        for name in imports(ast.parse(path.read_text(encoding="utf-8"))):
            if not name.startswith("megatron_opsft."):
                continue
            other_layer, other_entry = entry_of(name.removeprefix("megatron_opsft."))
            if other_entry != entry and other_layer >= layer:
                wrong.append(f"{module} imports {name}")
    assert wrong == []


def test_heavy_packages_are_named_only_in_their_homes() -> None:
    wrong = []
    for path in files():
        place = path.relative_to(PACKAGE).as_posix()
        for name in imports(ast.parse(path.read_text(encoding="utf-8"))):
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
        for line in cuda_mentions(ast.parse(path.read_text(encoding="utf-8")))
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
    for name in ("records", "config", "errors", "boxed"):
        tree = ast.parse((PACKAGE / f"{name}.py").read_text(encoding="utf-8"))
        top = {
            module.split(".")[0]
            for node in tree.body
            for module in imports(node)
            if isinstance(node, ast.Import | ast.ImportFrom)
        }
        assert "torch" not in top
