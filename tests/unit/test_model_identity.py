"""Hashes of a model's files: read once, and again only where a file may have changed."""

import os
import shutil
from pathlib import Path

import pytest

from megatron_opsft.models.storage.model_identity import combined, hash_model_files
from megatron_opsft.models.storage.model_paths import resolve_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return shutil.copytree(resolve_model("tiny_reasoner"), tmp_path / "model")


def test_content_counts_and_neither_place_nor_time(model: Path, tmp_path: Path) -> None:
    before = hash_model_files(model, {})
    assert before.keys() == {"config.json", "model.safetensors"}
    moved = model.rename(tmp_path / "other")
    os.utime(moved / "model.safetensors", (1, 1))
    assert combined(hash_model_files(moved, before)) == combined(before)
    (moved / "README.md").write_text("words")
    assert combined(hash_model_files(moved, before)) == combined(before)
    with (moved / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read()
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    assert combined(hash_model_files(moved, before)) != combined(before)


def test_an_unchanged_file_is_not_read_again(model: Path) -> None:
    """A known hash is taken as it is, so a wrong one shows that nothing was read."""
    known = hash_model_files(model, {})
    known["model.safetensors"][2] = "of before"
    assert hash_model_files(model, known)["model.safetensors"][2] == "of before"
    known["model.safetensors"][0] += 1
    assert hash_model_files(model, known)["model.safetensors"][2] != "of before"


def test_a_damaged_note_of_hashes_is_not_believed(model: Path) -> None:
    found = hash_model_files(model, {"config.json": 3, "model.safetensors": [1]})
    assert found == hash_model_files(model, {})
