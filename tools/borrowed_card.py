"""Makes the folder that travels to a borrowed machine: tools/borrowed_card.sh."""

import argparse
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from card.pieces import fail, make_pieces
from card.pins import canonical, read_pins

ROOT = Path(__file__).parents[1]
MADE = "made.txt"  # says that a folder is such a one, and of which commit
MOST_BYTES = 30_000_000
# pip looks for exactly these, whatever the interpreter that it runs in.
TARGET = "--only-binary=:all: --implementation cp --python-version 3.12"
GLIBC = "manylinux_2_34 manylinux_2_31 manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17"
PLATFORMS = f"{GLIBC} manylinux2014 manylinux2010 manylinux1 linux"
# What a dense model on an H100 never loads: FlashAttention 2 and 4, experts, multi-head latent
# attention, 4-bit products, the server's front end, and what only helps to compile.
LEFT_OUT = (
    "bin",
    "vllm/vllm-rs",
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
    "vllm/_moe_C_stable_libtorch.abi3.so",
    "vllm/_deepselect_C.abi3.so",
    "vllm/_flashkda_C.abi3.so",
    "vllm/_flashmla_C.abi3.so",
    "vllm/_flashmla_extension_C.abi3.so",
    "vllm/_qutlass_C.abi3.so",
    "vllm/third_party/deep_gemm",
    "vllm/third_party/fmha_sm100",
    "vllm/third_party/tml_fa4",
)


def pip(command: str, *words: object) -> None:
    """Run `pip COMMAND` for the machine that the folder is for."""
    platforms = [f"--platform={platform}_x86_64" for platform in PLATFORMS.split()]
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", *TARGET.split(), *platforms]
    call = [sys.executable, "-m", "pip", command, *options, *map(str, words)]
    if subprocess.run(call).returncode:
        fail(f"pip {command} did not get all packages of constraints/borrowed-card.txt")


def git(*words: str) -> str:
    ran = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    if ran.returncode:
        fail(f"git {words[0]} in {ROOT}: {ran.stderr.strip()}")
    return ran.stdout


def copy_project(target: Path) -> None:
    """What git tracks, as it is here. Files alone: links do not survive every way of copying."""
    shutil.rmtree(target, ignore_errors=True)
    links = []
    for name in git("ls-files", "-z").split("\0"):
        source, copy = ROOT / name, target / name
        if source.is_symlink():
            links.append(copy)
        elif source.is_file():  # it may be deleted here
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy)
    for link in links:
        place = Path(os.path.normpath(link.parent / (ROOT / link.relative_to(target)).readlink()))
        shutil.copytree(place, link)


def are_right(wheels: list[Path], pins: list[str]) -> bool:
    """Whether these files are whole, one for each pin, and of its version."""
    found = []
    for wheel in wheels:
        name, version, *_ = wheel.name.split("-")
        if not zipfile.is_zipfile(wheel) or zipfile.ZipFile(wheel).testzip():
            return False
        found.append((canonical(name), version))
    wanted = [pin.split("==") for pin in pins]
    return sorted(found) == sorted((canonical(name), version) for name, version in wanted)


def get_wheels(folder: Path) -> None:
    pins = read_pins("brought")
    if are_right([*folder.glob("*.whl")], pins):
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    pip("download", "--dest", folder, *pins)


def make_vllm_tree(tree: Path) -> None:
    """Install vLLM and what it imports as files, and take away what is left out."""
    pip("install", "--no-compile", "--target", tree, *read_pins("vllm"))
    if not (tree / "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so").exists():
        fail(
            "pip took a vllm without CUDA: it is set up to prefer another build. An empty setup "
            "gets the right one: PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS="
        )
    for name in LEFT_OUT:
        path = tree / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def size_of(folder: Path) -> int:
    """Bytes of the files that go along each time, so without vLLM and results."""
    files = [folder / MADE, folder / "run.sh"]
    for name in ("project", "wheels"):
        files += [path for path in (folder / name).rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", metavar="DIR", type=Path)
    parser.add_argument("--vllm", action="store_true", help="also the pieces of vLLM")
    args = parser.parse_args()
    folder: Path = args.folder
    is_new = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if not is_new and not (folder / MADE).is_file():
        fail(f"{folder} is there and was not made by this command; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    changed = " with changes" if git("status", "--porcelain", "--untracked-files=no") else ""
    made = f"megatron_opsft, commit {git('rev-parse', 'HEAD').strip()}{changed}\n"
    (folder / MADE).write_text(made, encoding="utf-8")
    copy_project(folder / "project")
    get_wheels(folder / "wheels")
    shutil.copy2(ROOT / "tools/card/run.sh", folder / "run.sh")
    size = size_of(folder)
    if size > MOST_BYTES:
        fail(f"{folder} has {size / 1e6:.1f} MB; at most {MOST_BYTES / 1e6:.0f} may travel")
    print(f"{folder}: project, wheels, run.sh, {size / 1e6:.1f} MB")
    if untracked := git("ls-files", "--others", "--exclude-standard").split("\n")[:-1]:
        print(f"left behind, as git does not track them: {', '.join(untracked)}")
    if args.vllm:
        content = "; ".join([*read_pins("vllm"), "without", *LEFT_OUT])
        sizes = make_pieces(folder / "vllm", content, make_vllm_tree)
        print(f"{folder}/vllm: {len(sizes)} pieces, {sum(sizes) / 1e6:.1f} MB")
    print(f"next, on the other machine: bash {folder.name}/run.sh a")


if __name__ == "__main__":
    main()
