"""Conversions: exact both ways, small in memory, whole or not there, and never wrong in silence."""

import errno
import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from forked_cli import ForkedCli
from hf_reference import hf_model
from safetensors.torch import load_file, save_file
from tiny_models import SHAPES, weights
from torch import Tensor

from megatron_opsft.commands.convert.run import (
    Format,
    differing_tensors,
    open_source,
    open_to_convert,
    write_source,
)
from megatron_opsft.errors import UserError
from megatron_opsft.models.architectures.config_from_hf import read_model_shape
from megatron_opsft.models.storage.dist_metadata import locate, read_metadata
from megatron_opsft.models.storage.hf_writer import write_hf_model
from megatron_opsft.models.storage.large_files import LargeFile
from megatron_opsft.models.storage.partial import partial_dir
from megatron_opsft.models.weights.rules import WeightTable
from megatron_opsft.runtime.durable import COMPLETE

SLOW = """
import time
from megatron_opsft.runtime import durable
from megatron_opsft.models.storage.partial import LargeFile
def slowly(write):
    def call(*args):
        time.sleep(0.002)
        write(*args)
        time.sleep(0.002)
    return call
durable.write_bytes = slowly(durable.write_bytes)
LargeFile.write = slowly(LargeFile.write)
"""


def write_hf(directory: Path, name: str = "qwen2", dtype: torch.dtype = torch.float32) -> Path:
    """A Hugging Face directory in several shards, as transformers writes it."""
    hf_model(name).to(dtype).save_pretrained(directory, max_shard_size="300KB")
    (directory / "tokenizer.json").write_text("{}")
    (directory / "chat_template.jinja").write_text("x")
    return directory


def edit(directory: Path, name: str, change: Callable[[Tensor], Tensor]) -> None:
    """Change one tensor of a Hugging Face directory."""
    for file in directory.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            tensors[name] = change(tensors[name])
            save_file(tensors, file, {"format": "pt"})


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return write_hf(tmp_path / "hf")


@pytest.fixture
def megatron(hf: Path, tmp_path: Path) -> Path:
    return run(hf, tmp_path / "megatron", "megatron")


def run(source: Path, out: Path, to: Format, **settings: Any) -> Path:
    """Into several files even for tiny models. Returns: out."""
    write_source(open_to_convert(source, to), out, to, max_shard_bytes=60_000, **settings)
    return out


def all_tensors(directory: Path) -> dict[str, Tensor]:
    return {k: v for file in directory.glob("*.safetensors") for k, v in load_file(file).items()}


def content_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("name", SHAPES)
def test_there_and_back_is_bit_identical(tmp_path: Path, name: str) -> None:
    source = write_hf(tmp_path / "hf", name, torch.bfloat16)
    megatron = run(source, tmp_path / "megatron", "megatron")
    back = run(megatron, tmp_path / "back", "hf")
    expected, found = all_tensors(source), all_tensors(back)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype is torch.bfloat16 and torch.equal(found[key], value), key
    assert len(list(megatron.glob("*.distcp"))) > 1
    index = json.loads((back / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == expected.keys()
    described = json.loads((source / "config.json").read_text())
    assert described["dtype"] == "bfloat16"
    for directory in (megatron, back):
        assert json.loads((directory / "config.json").read_text()) == described
    assert (back / "chat_template.jinja").read_text() == "x"
    assert differing_tensors(open_source(source), open_source(megatron)) == []


@pytest.mark.parametrize("to", ["megatron", "hf"])
def test_memory_does_not_grow_with_the_model(cli: ForkedCli, tmp_path: Path, to: str) -> None:
    """About 110 MB beside the libraries, as docs/convert.md says: also of 620 MB, half of them in
    one tensor.
    """
    peaks = []
    for hidden_size in (64, 4096):
        directory = tmp_path / f"{hidden_size}"
        config = hf_model("qwen2").config
        config.update({"hidden_size": hidden_size, "vocab_size": 36_000, "dtype": "bfloat16"})
        config.save_pretrained(directory)
        shapes = WeightTable(read_model_shape(directory), "te").hf_shapes()
        zeros = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
        save_file(zeros, directory / "model.safetensors", {"format": "pt"})
        del zeros
        words = ["convert", "to-megatron", "--hf", directory, "--out", tmp_path / "megatron"]
        if to == "hf":
            write_source(open_source(directory), tmp_path / "megatron", "megatron")
            shutil.rmtree(directory)
            words = ["convert", "to-hf", "--megatron", tmp_path / "megatron", "--out", directory]
        ended = cli.run(words)
        assert ended.exit_code == 0, ended.stderr
        (peak,) = re.findall(r"peak memory ([0-9]+) MiB", ended.stdout)
        peaks.append(int(peak))
        shutil.rmtree(tmp_path / "megatron")
    small, large = peaks
    assert large - small < 110


def test_dtype_is_cast_and_each_tensor_keeps_its_own(hf: Path, tmp_path: Path) -> None:
    short = run(hf, tmp_path / "a", "megatron", dtype="bfloat16")
    found = all_tensors(run(short, tmp_path / "b", "hf"))
    assert all(torch.equal(found[key], value.bfloat16()) for key, value in all_tensors(hf).items())
    edit(hf, "model.norm.weight", Tensor.half)
    mixed = all_tensors(run(run(hf, tmp_path / "c", "megatron"), tmp_path / "d", "hf"))
    assert mixed["model.norm.weight"].dtype is torch.float16
    assert all(torch.equal(mixed[key], value) for key, value in all_tensors(hf).items())


@pytest.mark.parametrize(
    ("name", "other"),
    [("1.mlp.up_proj", "1.mlp.gate_proj"), ("1.input_layernorm", "have torch.float32 in decoder")],
)
def test_tensors_that_megatron_holds_in_one_need_one_dtype(
    hf: Path, tmp_path: Path, name: str, other: str
) -> None:
    edit(hf, f"model.layers.{name}.weight", Tensor.half)
    with pytest.raises(UserError, match=f"{name}.weight is torch.float16.*{other}.* give --dtype"):
        run(hf, tmp_path / "a", "megatron")
    run(hf, tmp_path / "a", "megatron", dtype="float32")


@pytest.mark.parametrize(
    ("to", "value", "dtype", "wider"),
    [
        ("megatron", 65_520.0, torch.float16, "bfloat16 or float32"),
        ("hf", -3.4e38, torch.bfloat16, "float32"),
    ],
)
def test_finite_values_that_would_become_infinite_are_refused(
    hf: Path, tmp_path: Path, to: Format, value: float, dtype: torch.dtype, wider: str
) -> None:
    """float16 ends at 65,504, and bfloat16 just below float32; infinities stay what they are."""
    name = "model.layers.0.mlp.up_proj.weight"
    dtypes = dict.fromkeys(open_source(hf).shapes(), dtype)
    for number in (value, torch.finfo(dtype).max, float("inf")):
        edit(hf, name, lambda t, x=number: t.index_fill(0, torch.tensor([3]), x))
        wide, out = run(hf, tmp_path / f"wide {number}", "megatron"), tmp_path / f"out {number}"
        convert = partial(run, wide if to == "hf" else hf, out, to, dtype=str(dtype)[6:])
        if number != value:
            convert()
            assert differing_tensors(open_source(hf), open_source(out), dtypes=dtypes) == []
            continue
        with pytest.raises(UserError, match=rf"tensor {name} holds .*choose {wider}$"):
            convert()
        assert not out.exists() and not partial_dir(out).exists()
        with pytest.raises(UserError, match=f"tensor {name} holds"):  # as --verify compares
            differing_tensors(open_source(hf), open_source(wide), dtypes=dtypes)


def test_overwrite_never_deletes_what_is_read(hf: Path, megatron: Path, tmp_path: Path) -> None:
    """Nor what holds it, or leads to it. See test_replacing.py for what else is kept."""
    linked = tmp_path / "models" / "linked"
    shutil.copytree(hf, linked)
    for file in linked.glob("*.safetensors"):
        file.unlink()
        file.symlink_to(hf / file.name)
    everything = {p: p.is_file() and p.read_bytes() for p in tmp_path.rglob("*")}
    for source, out in ((hf, hf), (megatron, megatron), (linked, hf), (linked, linked.parent)):
        with pytest.raises(UserError, match=r"(is|holds) what is read"):
            run(source, out, "hf" if source == megatron else "megatron", overwrite=True)
    assert {p: p.is_file() and p.read_bytes() for p in tmp_path.rglob("*")} == everything


@pytest.mark.parametrize("to", ["megatron", "hf"])
def test_kills_at_random_moments_end_in_the_same_bytes(
    cli: ForkedCli, hf: Path, megatron: Path, tmp_path: Path, to: str
) -> None:
    source, flag = (hf, "--hf") if to == "megatron" else (megatron, "--megatron")
    words = ["convert", f"to-{to}", flag, source, "--shard-size", "60KB", "--out"]
    cli.run(["config", "--reference"])  # the server is ready: from here on seconds mean something
    begin = time.monotonic()
    assert cli.run([*words, tmp_path / "whole"], SLOW).exit_code == 0
    seconds = time.monotonic() - begin
    draw, out, kills = random.Random(0), tmp_path / "out", 0
    while kills < 4:
        started = cli.start([*words, out], SLOW)
        time.sleep(draw.uniform(0, 0.9) * seconds)
        with suppress(ProcessLookupError):  # it has ended
            os.kill(started.pid, signal.SIGKILL)
        kills += started.wait().exit_code != 0
        if out.exists():  # whole, or not there
            assert content_of(out) == content_of(tmp_path / "whole")
            shutil.rmtree(out)
    assert cli.run([*words, out]).exit_code == 0
    assert content_of(out) == content_of(tmp_path / "whole")
    assert not partial_dir(out).exists()


DYING_WHILE_IT_DELETES = """
import os, signal, shutil
rmtree = shutil.rmtree
def some_of_it(path, *args, **kwargs):
    entries = sorted(os.scandir(path), key=lambda entry: entry.name) if os.path.isdir(path) else []
    if len(entries) > 3:
        os.unlink(entries[0].path)
        os.kill(os.getpid(), signal.SIGKILL)
    rmtree(path, *args, **kwargs)
shutil.rmtree = some_of_it
"""


def test_what_a_killed_conversion_has_half_deleted_never_comes_back(
    cli: ForkedCli, hf: Path, tmp_path: Path
) -> None:
    """The model that `--overwrite` replaces, after somebody has removed the new one."""
    out = tmp_path / "out"
    run(hf, out, "megatron")
    before = content_of(out)
    words = ["convert", "to-megatron", "--hf", hf, "--out", out, "--shard-size", "60KB"]
    killed = cli.run([*words, "--overwrite"], DYING_WHILE_IT_DELETES)
    assert killed.exit_code == -signal.SIGKILL and content_of(out) == before
    shutil.rmtree(out)
    with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patched:
        patched.setattr(LargeFile, "write", MagicMock(side_effect=KeyboardInterrupt))
        run(hf, out, "megatron")
    assert not out.exists()
    run(hf, out, "megatron")
    assert content_of(out) == before and not partial_dir(out).exists()


def test_no_file_is_open_when_its_directory_is_removed(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS it would stay there as `.nfs*`, and the directory with it."""
    out, rmdir, refused = tmp_path / "out", os.rmdir, list[str]()

    def rmdir_here(path: str | Path, **where: Any) -> None:
        for number in os.listdir("/proc/self/fd"):
            with suppress(FileNotFoundError):
                link = os.readlink(f"/proc/self/fd/{number}")
                if link.startswith(f"{partial_dir(out)}/") and not os.path.isdir(link):
                    refused.append(link)
        rmdir(path, **where)

    with monkeypatch.context() as patched:
        patched.setattr(os, "rmdir", rmdir_here)
        run(hf, out, "megatron")
    assert not partial_dir(out).exists() and refused == []


def test_a_writer_and_a_conversion_keep_each_other_out(hf: Path, tmp_path: Path) -> None:
    out, ones = tmp_path / "out", torch.ones(3)
    write = partial(write_hf_model, out, shapes={"a": (3,)}, dtype=torch.float32, source_dir=hf)

    def stream() -> Iterator[tuple[str, Tensor]]:
        for other in (lambda: write([]), lambda: run(hf, out, "megatron")):
            with pytest.raises(UserError, match="is being written by another process"):
                other()
        yield "a", ones

    write(stream())
    assert torch.equal(load_file(out / "model.safetensors")["a"], ones)
    assert not partial_dir(out).exists()


@pytest.mark.parametrize(
    "fault",
    [
        (LargeFile, "write", lambda file, data, offset: offset > 0),
        (LargeFile, "sync", lambda file: not os.ftruncate(file._file, 0)),  # its pages are lost
        (Path, "rename", lambda path, to: path.name == "data"),  # the second of two renames
    ],
)
@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
def test_an_error_at_any_point_keeps_what_was_there_and_the_next_try_begins_anew(
    hf: Path, megatron: Path, monkeypatch: pytest.MonkeyPatch, fault: Any, error: BaseException
) -> None:
    """fault: the owner of a function, its name, and which of its calls fails."""
    owner, name, when = fault
    before, original = content_of(megatron), getattr(owner, name)

    def failing(self: Any, *args: Any) -> Any:
        if when(self, *args):
            raise error
        return original(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, failing)
        with pytest.raises((UserError, KeyboardInterrupt)) as caught:
            run(hf, megatron, "megatron", dtype="float16", overwrite=True)
        if isinstance(caught.value, UserError):
            assert "Input/output error" in str(caught.value)
    assert content_of(megatron) == before and not partial_dir(megatron).exists()
    run(hf, megatron, "megatron", overwrite=True)
    assert content_of(megatron) == before


def test_wrong_direction_and_missing_config_are_named(
    cli: ForkedCli, hf: Path, megatron: Path, tmp_path: Path
) -> None:
    for step in (1, 2):
        (tmp_path / f"run/step_{step:06d}").mkdir(parents=True)
        (tmp_path / f"run/step_{step:06d}" / COMPLETE).write_text("{}")
    for words, message in (
        (["to-megatron", "--hf", megatron], "other way"),
        (["to-hf", "--megatron", hf], "other way"),
        (["to-hf", "--megatron", tmp_path / "gone"], "not a directory"),
        (["to-hf", "--megatron", tmp_path / "run"], f"such as {tmp_path / 'run/step_000002'}"),
        (["to-hf", "--megatron", megatron, "--shard-size", "many"], "--shard-size=many"),
        (["to-hf", "--megatron", megatron, "--shard-size", "0.5"], "--shard-size=0.5"),
        (["to-hf", "--megatron", megatron, "--shard-size", "9" * 40], "--shard-size=999"),
    ):
        ended = cli.run(["convert", *words, "--out", tmp_path / "out"])
        assert ended.exit_code == 2
        assert message in ended.stderr and ended.stderr.count("\n") == 1
    (megatron / "config.json").unlink()
    with pytest.raises(UserError, match="--config-from"):
        open_source(megatron)
    assert set(open_source(megatron, hf).dtypes().values()) == {torch.float32}


def test_check_tells_equal_from_different(cli: ForkedCli, hf: Path, megatron: Path) -> None:
    number = len(weights("qwen2"))
    equal = cli.run(["convert", "check", hf, megatron])
    assert (equal.exit_code, equal.stdout) == (0, f"equal: {number} tensors\n")
    edit(hf, "model.norm.weight", lambda tensor: tensor + 1)
    different = cli.run(["convert", "check", hf, megatron])
    said = f"model.norm.weight: other values\n1 of {number} tensors differ\n"
    assert (different.exit_code, different.stdout) == (4, said)


@pytest.mark.parametrize("vocab_size", [290, 310])
def test_a_configuration_with_another_vocabulary_is_refused(
    megatron: Path, tmp_path: Path, vocab_size: int
) -> None:
    """Both would fit: the checkpoint pads the 301 tokens to 384."""
    path = megatron / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": vocab_size}))
    said = f"converted from a model with vocab_size=301, but config.json says {vocab_size}"
    with pytest.raises(UserError, match=said):
        run(megatron, tmp_path / "back", "hf")
    (megatron / "conversion.json").write_text("{}\n")  # as earlier versions wrote it
    run(megatron, tmp_path / "back", "hf")


def flip(path: Path, draw: random.Random) -> None:
    """One bit that is no number's: of a header, of metadata, or of what is around a tensor."""
    content = bytearray(path.read_bytes())
    places = set(range(len(content)))
    if path.suffix == ".safetensors":
        places = set(range(8 + int.from_bytes(content[:8], "little")))
    elif path.suffix == ".distcp":
        for tensor in read_metadata(path.parent).values():
            for region in (locate(chunk) for chunk in tensor.chunks if chunk.path == path):
                places -= set(range(region.offset, region.offset + region.num_bytes))
    content[draw.choice(sorted(places))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def cut(path: Path, draw: random.Random) -> None:
    os.truncate(path, draw.randrange(path.stat().st_size))


def remove(path: Path, draw: random.Random) -> None:
    path.unlink()


def change_tensor(path: Path, draw: random.Random) -> None:
    """Its name, shape or dtype."""
    tensors = load_file(path)
    name = draw.choice(sorted(tensors))
    value = tensors.pop(name)
    change = draw.choice([None, value[:-1], value[None], value.double()])
    tensors[name + "x" * (change is None)] = value if change is None else change
    save_file(tensors, path)


DAMAGE: dict[str, dict[str, list[Callable[[Path, random.Random], None]]]] = {
    "megatron": {
        "*.safetensors": [flip, cut, remove, change_tensor],
        "*.index.json": [cut],
        "config.json": [cut],
    },
    "hf": {".metadata": [flip, cut], "*.distcp": [flip, cut, remove]},
}


@pytest.mark.slow
@pytest.mark.parametrize("to", ["megatron", "hf"])
def test_damaged_input_is_an_error_or_harmless(
    hf: Path, megatron: Path, tmp_path: Path, to: Format
) -> None:
    source = hf if to == "megatron" else megatron
    kinds = [(pattern, damage) for pattern, all_ in DAMAGE[to].items() for damage in all_]
    draw, num_errors = random.Random(to), 0
    for number in range(60):
        damaged, out = shutil.copytree(source, tmp_path / f"damaged{number}"), tmp_path / "out"
        pattern, damage = kinds[number % len(kinds)]
        damage(draw.choice(sorted(damaged.glob(pattern))), draw)
        try:
            run(damaged, out, to)
        except UserError as error:
            assert "\n" not in str(error)
            assert not out.exists() and not partial_dir(out).exists()
            num_errors += 1
        else:  # a bit that means nothing, such as padding: then the result is right
            assert differing_tensors(open_source(hf), open_source(out)) == []
        shutil.rmtree(damaged)
        shutil.rmtree(out, ignore_errors=True)
    assert num_errors >= 40
