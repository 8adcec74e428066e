"""`--out`: only what this project made is replaced, and only by something whole."""

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opsft.errors import UserError
from megatron_opsft.models.storage.model_paths import INDEX_NAME, SINGLE_NAME
from megatron_opsft.models.storage.partial import partial_dir, written_whole
from megatron_opsft.models.storage.replacing import check_out
from megatron_opsft.runtime.durable import write_files

WHOLE = [SINGLE_NAME, INDEX_NAME]
FILES = st.sampled_from(
    ["config.json", "conversion.json", "metadata.json", ".metadata", "notes.txt", *WHOLE]
)
FOLDERS = st.sampled_from(["src", "data", "checkpoints", "tokenizer", "onnx", ".cache"])


def fill(directory: Path, files: set[str], folders: set[str]) -> None:
    directory.mkdir()
    for name in files:
        (directory / name).write_text("{}")
    for name in folders:
        (directory / name).mkdir()


@given(st.sets(FILES), st.sets(FOLDERS), st.booleans())
def test_only_a_model_a_conversion_or_nothing_may_be_replaced(
    files: set[str], folders: set[str], overwrite: bool
) -> None:
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "out"
        fill(out, files, folders)
        try:
            check_out(out, [], overwrite=overwrite)
            allowed = True
        except UserError as error:
            assert "\n" not in str(error)
            allowed = False
        assert {path.name for path in out.iterdir()} == files | folders
    is_hf = "config.json" in files and bool(files & set(WHOLE))
    is_converted = {"conversion.json", "metadata.json", ".metadata"} <= files
    foreign = (files | folders) & {"src", "data", "checkpoints", "notes.txt"}
    wanted = not foreign and (not files | folders or is_hf or is_converted)
    assert allowed == (overwrite and wanted)


ENDS = ["published", "failed", "killed", "killed between two renames", "killed at the end"]


@settings(max_examples=30)
@given(st.lists(st.sampled_from(ENDS), max_size=6))
def test_an_output_is_the_old_or_the_new_one_whatever_ended_the_tries(ends: list[str]) -> None:
    with tempfile.TemporaryDirectory() as place:
        out, left = Path(place) / "out", partial_dir(Path(place) / "out")
        names = {"out", "out.partial", ".out2.partial", "out2", ".out"}
        for name in names:
            fill(Path(place) / name, {"old"}, set())
        content = "old"
        for number, end in enumerate([*ends, "failed"]):
            if "killed" not in end:
                with suppress(RuntimeError), written_whole(out) as partial:
                    write_files(partial.directory, {f"new {number}": b""})
                    if end == "failed":
                        raise RuntimeError
                content = f"new {number}" if end == "published" else content
                assert [path.name for path in out.iterdir()] == [content]
                assert {path.name for path in Path(place).iterdir()} == names
                continue
            left.mkdir(exist_ok=True)
            (left / "lock").touch()
            if not (left / "data").exists() and end != "killed at the end":
                fill(left / "data", {"half"}, set())
            if end == "killed between two renames" and not (left / "replaced").exists():
                out.rename(left / "replaced")
            elif end == "killed at the end" and out.exists():
                shutil.rmtree(left / "replaced", ignore_errors=True)
                fill(left / "replaced", {"older"}, set())
        assert all((Path(place) / name / "old").exists() for name in names - {"out"})
