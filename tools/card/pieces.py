"""A tree of files as pieces that travel one at a time: part-00, part-01, ..., and pieces.json.

Usage: python pieces.py join FOLDER TARGET - put the pieces in FOLDER together as TARGET/tree. Those
that came are kept in TARGET/pieces until the last one is there. Needs Python's standard library.
"""

import hashlib
import json
import lzma
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

PIECE_BYTES = 40_000_000
MANIFEST = "pieces.json"  # content: what the tree is made of; pieces: name -> SHA-256


def fail(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_piece(path: Path, digest: str) -> bool:
    """Whether the file is there and whole."""
    return path.is_file() and checksum(path) == digest


def make_pieces(folder: Path, content: str, fill: Callable[[Path], None]) -> list[int]:
    """Write the pieces of a tree into a folder of their own; how many bytes each one has.

    content: what the tree is made of; pieces of the same content that are whole stay as they are.
    fill: writes the tree into an empty folder.
    """
    manifest = folder / MANIFEST
    if manifest.is_file():
        there = json.loads(manifest.read_text(encoding="utf-8"))
        whole = [is_piece(folder / name, digest) for name, digest in there["pieces"].items()]
        if there["content"] == content and all(whole):
            return [(folder / name).stat().st_size for name in there["pieces"]]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with tempfile.TemporaryDirectory(dir=folder) as work:
        tree, archive = Path(work) / "tree", Path(work) / "tree.tar.xz"
        tree.mkdir()
        fill(tree)
        pack(tree, archive)
        paths = split(archive, folder)
    digests = {path.name: checksum(path) for path in paths}
    text = json.dumps({"content": content, "pieces": digests}, indent=1)
    manifest.write_text(text, encoding="utf-8")
    return [path.stat().st_size for path in paths]


def pack(tree: Path, archive: Path) -> None:
    """The same files give the same archive."""

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.mtime = entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        return entry

    with (
        lzma.open(archive, "wb", preset=9 | lzma.PRESET_EXTREME) as compressed,
        tarfile.open(fileobj=compressed, mode="w") as tar,
    ):
        tar.add(tree, arcname=".", filter=plain)


def split(archive: Path, folder: Path) -> list[Path]:
    paths: list[Path] = []
    with archive.open("rb") as file:
        while block := file.read(PIECE_BYTES):
            path = folder / f"part-{len(paths):02d}"
            path.write_bytes(block)
            paths.append(path)
    return paths


def join(folder: Path, target: Path) -> None:
    """Unpack the tree where all pieces have come.

    Errors: a damaged or missing piece ends the process, which names it in one line.
    """
    manifest, kept = folder / MANIFEST, target / "pieces"
    if not manifest.is_file():
        fail(f"there is no {manifest}; make this folder with tools/borrowed_card.sh --vllm")
    text = manifest.read_text(encoding="utf-8")
    joined = target / "joined.json"
    if joined.is_file() and joined.read_text(encoding="utf-8") == text:
        return
    kept.mkdir(parents=True, exist_ok=True)
    digests = json.loads(text)["pieces"]
    missing = []
    for name, digest in digests.items():
        sent = folder / name
        if is_piece(kept / name, digest):
            continue
        if is_piece(sent, digest):
            shutil.copyfile(sent, kept / name)
        elif sent.is_file():
            fail(f"{sent} is damaged; send it again")
        else:
            missing.append(name)
    if missing:
        fail(
            f"{', '.join(missing)} of {len(digests)} pieces did not come yet; send what is missing "
            f"to {folder}, and call the same again: the others are kept in {kept}"
        )
    unpack([kept / name for name in digests], target)
    shutil.rmtree(kept)
    joined.write_text(text, encoding="utf-8")
    print(f"joined {len(digests)} pieces: {target / 'tree'}")


def unpack(pieces: list[Path], target: Path) -> None:
    """Write target/tree."""
    archive, tree = target / "tree.tar.xz", target / "tree"
    with archive.open("wb") as whole:
        for piece in pieces:
            with piece.open("rb") as file:
                shutil.copyfileobj(file, whole)
    shutil.rmtree(tree, ignore_errors=True)
    with tarfile.open(archive, "r:xz") as tar:
        tar.extractall(tree, filter="data")
    archive.unlink()


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] != "join":
        fail("usage: pieces.py join FOLDER TARGET")
    join(Path(sys.argv[2]), Path(sys.argv[3]))
