"""`--out` and identities: only what this project made is replaced; what differs is told apart."""

import json
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opsft.errors import UserError
from megatron_opsft.evaluate.settings import EvaluationDirectory
from megatron_opsft.storage.hf_files import WEIGHT_NAMES
from megatron_opsft.storage.partial import partial_dir, written_whole
from megatron_opsft.storage.replacing import MODEL_FOLDERS, check_out

WHOLE = [name for name in WEIGHT_NAMES if "*" not in name]
FILES = st.sampled_from(
    ["config.json", "conversion.json", "metadata.json", ".metadata", "notes.txt", *WHOLE]
)
FOLDERS = st.sampled_from(["src", "data", "checkpoints", *(f.rstrip("*") for f in MODEL_FOLDERS)])


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
    foreign = folders & {"src", "data", "checkpoints"}
    wanted = not foreign and (not files | folders or is_hf or is_converted)
    assert allowed == (overwrite and wanted)


ENDS = ["published", "failed", "killed", "killed between two renames", "killed at the end"]


@settings(max_examples=30)
@given(st.lists(st.sampled_from(ENDS), max_size=6))
def test_an_output_is_the_old_or_the_new_one_whatever_ended_the_tries(ends: list[str]) -> None:
    with tempfile.TemporaryDirectory() as place:
        out, left = Path(place) / "out", partial_dir(Path(place) / "out")
        fill(out, {"old"}, set())
        neighbours = ["out.partial", ".out2.partial", "out2", ".out"]
        for name in neighbours:
            fill(Path(place) / name, {"kept"}, set())
        content = {"old"}
        for number, end in enumerate(ends):
            if "killed" in end:
                left.mkdir(exist_ok=True)
                (left / "lock").touch()
                if not (left / "data").exists() and end != "killed at the end":
                    fill(left / "data", {"half"}, set())
                if end == "killed between two renames" and not (left / "replaced").exists():
                    out.rename(left / "replaced")
                elif end == "killed at the end" and out.exists():
                    shutil.rmtree(left / "replaced", ignore_errors=True)
                    fill(left / "replaced", {"older"}, set())
                continue
            new = {f"new {number}"}
            with suppress(RuntimeError), written_whole(out) as partial:
                partial.write_small(dict.fromkeys(new, b""))
                if end == "failed":
                    raise RuntimeError
            content = new if end == "published" else content
            assert {path.name for path in out.iterdir()} == content and not left.exists()
        with suppress(RuntimeError), written_whole(out):
            raise RuntimeError
        assert {path.name for path in out.iterdir()} == content
        assert {path.name for path in Path(place).iterdir()} == {"out", *neighbours}
        assert all((Path(place) / name / "kept").exists() for name in neighbours)


JSON = st.none() | st.booleans() | st.integers(-3, 3) | st.floats(0, 1) | st.text("ab", max_size=2)
SETTINGS = ("temperature", "engine", "tp", "shape", "seed")
DATA = st.dictionaries(st.sampled_from(["gsm8k", "aime24", "mini"]), st.sampled_from("12"))
IDENTITIES = st.builds(
    lambda flat, shape, data: flat | {"shape": shape, "data": data},
    st.fixed_dictionaries({key: JSON for key in SETTINGS}),
    st.fixed_dictionaries({"layers": JSON}, optional={"rope": JSON}),
    DATA,
)


@settings(max_examples=60)
@given(IDENTITIES, st.sets(st.sampled_from(SETTINGS)), st.dictionaries(st.just("seed"), JSON), DATA)
def test_identities_are_merged_and_what_differs_is_refused(
    old: dict[str, Any], unset: set[str], changed: dict[str, Any], data: dict[str, str]
) -> None:
    """unset: settings that the evaluation in the directory was made without."""
    new = old | changed | {"data": data}
    before = {key: value for key, value in old.items() if key not in unset}
    known_data = {name: old["data"].get(name, digest) for name, digest in data.items()}
    same_seed = json.dumps(new["seed"]) == json.dumps(old["seed"])  # True is not 1
    agrees = data == known_data and not unset and same_seed
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        out = EvaluationDirectory(directory)
        out.write_manifest({"identity": before})
        try:
            out.open(new, overwrite=False)
        except UserError as error:
            assert "\n" not in str(error) and not agrees
            assert out.identified()["identity"] == before
            return
        assert agrees
        out.remember({"identity": new})
        assert out.identified()["identity"] == new | {"data": old["data"] | data}
        out.open(new | {"data": {}}, overwrite=False)
