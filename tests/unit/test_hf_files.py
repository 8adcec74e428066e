"""Hugging Face directories: lazy exact reads, damage that is named, atomic and streaming writes."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from hf_reference import hf_model
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from tiny_models import SHAPES, weights
from transformers import AutoModelForCausalLM

from megatron_opsft.errors import UserError
from megatron_opsft.models.architectures.config_from_hf import read_model_shape
from megatron_opsft.models.storage.hf_files import HfTensors, check_checkpoint
from megatron_opsft.models.storage.hf_writer import side_files, write_hf_model
from megatron_opsft.models.storage.model_paths import resolve_model
from megatron_opsft.models.weights.rectangles import Rect
from megatron_opsft.models.weights.rules import WeightTable

INDEX = "model.safetensors.index.json"


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A tiny tied Qwen2 in several shards, as transformers writes it."""
    path = tmp_path / "source"
    hf_model("qwen2_tied").save_pretrained(path, max_shard_size="100KB")
    for name in ("tokenizer.json", "chat_template.jinja", "optimizer.pt"):
        (path / name).write_text("{}")
    return path


def test_reads_slices_names_shapes_and_dtypes(model_dir: Path) -> None:
    tensors, expected = HfTensors(model_dir), weights("qwen2_tied")
    assert tensors.shapes() == {name: tuple(value.shape) for name, value in expected.items()}
    name, bias = "model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.bias"
    assert tensors.dtype(name) is torch.float32
    assert torch.equal(tensors.read(Rect(name, 3, 9, 0, 96)), expected[name][3:9])
    assert torch.equal(tensors.read(Rect(name, 0, 64, 3, 9)), expected[name][:, 3:9])
    assert torch.equal(tensors.read(Rect(bias, 8, 16, 0, 1)), expected[bias][8:16])
    check_checkpoint(tensors, WeightTable(read_model_shape(model_dir)))


def test_a_repeated_tied_head_must_equal_the_embedding(tmp_path: Path) -> None:
    state, table = weights("qwen2_tied"), WeightTable(SHAPES["qwen2_tied"])
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, tmp_path / "model.safetensors")
    check_checkpoint(HfTensors(tmp_path), table)
    state["lm_head.weight"][99, 0] += 1
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"tie_word_embeddings=true, but lm_head\.weight differs"):
        check_checkpoint(HfTensors(tmp_path), table)


def test_missing_cut_and_quantised_shards_and_a_wrong_index_are_named(model_dir: Path) -> None:
    index = json.loads((model_dir / INDEX).read_text())
    file = next(iter(index["weight_map"].values()))

    def check_refused(message: str) -> None:
        with pytest.raises(UserError, match=message) as error:
            HfTensors(model_dir)
        assert "\n" not in str(error.value)

    for weight_map, message in (
        (index["weight_map"] | {"x": "gone.safetensors"}, "shard .*gone.safetensors is missing"),
        ({"x": "../up.safetensors"}, "must map tensors to file names"),
        ({}, "must map tensors to file names"),
    ):
        (model_dir / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        check_refused(message)
    (model_dir / INDEX).write_text("{")
    check_refused(INDEX)
    (model_dir / INDEX).write_text(json.dumps(index))
    content = (model_dir / file).read_bytes()
    for keep in (0, 50, len(content) - 1):
        (model_dir / file).write_bytes(content[:keep])
        check_refused(f"{file} is damaged or cut short")
    save_file({"w": torch.zeros(2, dtype=torch.int8)}, model_dir / "model.safetensors")
    check_refused("tensor w has dtype I8")


def test_the_index_decides_which_shard_has_a_tensor(model_dir: Path) -> None:
    """Shards may hold what an earlier version of the model left there, in any dtype."""
    index = json.loads((model_dir / INDEX).read_text())["weight_map"]
    expected, norm = weights("qwen2_tied"), "model.norm.weight"
    other = next(file for file in index.values() if file != index[norm])
    left = {norm: torch.zeros(64), "model.old.weight": torch.zeros(3, dtype=torch.int8)}
    save_file(load_file(model_dir / other) | left, model_dir / other)
    tensors = HfTensors(model_dir)
    check_checkpoint(tensors, WeightTable(read_model_shape(model_dir)))
    assert torch.equal(tensors.read(Rect(norm, 0, 64, 0, 1)), expected[norm])
    for file, names in tensors.names_by_file().items():
        assert names == {name for name, shard in index.items() if shard == file.name}
    moved = {
        "weight_map": index
        | {norm: next(f for f in index.values() if f not in (other, index[norm]))}
    }
    (model_dir / INDEX).write_text(json.dumps(moved))
    with pytest.raises(UserError, match=f"lacks tensor {norm}, which {INDEX} places there"):
        HfTensors(model_dir)


def test_the_weights_chosen_are_those_that_transformers_loads(model_dir: Path) -> None:
    """Different models in one directory; the first in transformers' order is taken away."""
    state, norm = weights("qwen2_tied"), "model.norm.weight"
    for number, file in enumerate(files := ["model.safetensors", "other.safetensors"]):
        save_file(state | {norm: torch.full((64,), float(number))}, model_dir / file)
    index = {"metadata": {}, "weight_map": dict.fromkeys(state, files[1])}
    (model_dir / INDEX).write_text(json.dumps(index))
    for number, file in enumerate(files):
        loaded = AutoModelForCausalLM.from_pretrained(model_dir).state_dict()[norm]
        assert torch.equal(loaded, torch.full((64,), float(number)))
        assert torch.equal(HfTensors(model_dir).read(Rect(norm, 0, 64, 0, 1)), loaded)
        (model_dir / file).unlink()
    (model_dir / INDEX).unlink()
    with pytest.raises(UserError, match=r"holds no weights: neither model\.safetensors nor"):
        HfTensors(model_dir)


def test_hub_downloads_are_what_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No copies in other formats or in folders."""
    wanted = {"config.json", "tokenizer.model", "additional_chat_templates/tool.jinja"}
    wanted |= {"model-00001-of-00001.safetensors", INDEX}
    others = {"pytorch_model.bin", "consolidated.safetensors", "training_args.pt"}
    others |= {"onnx/model.safetensors", "original/params.json", "fp8/model.safetensors"}

    def download(name: str, **patterns: list[str]) -> str:
        for file in filter_repo_objects(sorted(wanted | others), **patterns):
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).touch()
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_model("some/model") == tmp_path
    files = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()}
    assert files == wanted


@pytest.mark.parametrize("max_shard_bytes", [100_000, 5_000_000_000])
def test_written_model_is_bit_identical_and_loads_in_transformers(
    tmp_path: Path, model_dir: Path, max_shard_bytes: int
) -> None:
    out_dir = tmp_path / "new" / "hf"
    written, table = weights("qwen2_tied"), WeightTable(SHAPES["qwen2_tied"])
    settings = {"shapes": table.hf_shapes(), "dtype": torch.float32, "source_dir": model_dir}
    settings |= {"max_shard_bytes": max_shard_bytes, "more_files": {"README.md": b"# A model"}}
    write_hf_model(out_dir, written.items(), **settings)
    assert (out_dir / "README.md").read_text() == "# A model"
    got = AutoModelForCausalLM.from_pretrained(out_dir).state_dict()
    assert all(torch.equal(got[name], value) for name, value in written.items())
    files = {path.name for path in out_dir.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json"} < files
    assert "optimizer.pt" not in files and (INDEX in files) == (max_shard_bytes == 100_000)
    assert [path.name for path in out_dir.parent.iterdir()] == ["hf"]
    check_checkpoint(HfTensors(out_dir), table)


def test_templates_tokenizers_and_code_come_along_and_every_dtype_changes(model_dir: Path) -> None:
    carried = {"additional_chat_templates/tool_use.jinja", "custom_generate/generate.py"}
    carried |= {"tekken.json", "spiece.model"}
    for name in carried:
        (model_dir / name).parent.mkdir(exist_ok=True)
        (model_dir / name).write_text(name)
    config = json.loads((model_dir / "config.json").read_text())
    for keys in (["dtype", "torch_dtype"], ["torch_dtype"], ["dtype"], []):
        text = {key: value for key, value in config.items() if not key.endswith("dtype")}
        text |= dict.fromkeys(keys, "float32")
        (model_dir / "config.json").write_text(json.dumps(text))
        files = side_files(model_dir, torch.bfloat16)
        assert all(files[name].decode() == name for name in carried)
        written = json.loads(files["config.json"])
        dtypes = {key: written[key] for key in written if key.endswith("dtype")}
        assert dtypes == dict.fromkeys(keys or ["dtype"], "bfloat16")


def test_tensors_in_any_order_are_the_same_bytes_and_cast(tmp_path: Path, model_dir: Path) -> None:
    draw = torch.Generator().manual_seed(1)
    shapes = {"a": (10, 4), "b": (3,), "c": (6, 6), "d": (2, 2)}
    tensors = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    settings = {"shapes": shapes, "dtype": torch.bfloat16, "source_dir": model_dir}
    for out, names in (("one", "abcd"), ("two", "dbca")):
        spread = [(n, tensors[n].t().contiguous().t() if n == "c" else tensors[n]) for n in names]
        write_hf_model(tmp_path / out, spread, **settings)
    one, two = (tmp_path / out / "model.safetensors" for out in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
    loaded = load_file(one)
    assert all(torch.equal(loaded[name], t.bfloat16()) for name, t in tensors.items())
    assert json.loads((tmp_path / "one" / "config.json").read_text())["dtype"] == "bfloat16"


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path, model_dir: Path) -> None:
    settings = {"shapes": {"a": (2, 2), "b": (3,)}, "dtype": torch.float16, "source_dir": model_dir}
    out = tmp_path / "out"
    write = partial(write_hf_model, out, **settings)
    whole = [("a", torch.ones(2, 2)), ("b", torch.ones(3))]

    def check_refused(**more: bool) -> None:
        with pytest.raises(UserError, match="tensor a holds 1e\\+30, but float16 goes to 65504"):
            write([("a", torch.full((2, 2), 1e30))], **more)
        with pytest.raises(ValueError, match="never written: b"):
            write(whole[:1], **more)

    check_refused()
    assert {path.name for path in tmp_path.iterdir()} == {"source"}
    write(whole)
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="already exists"):
        write(whole)
    check_refused(overwrite=True)
    assert (out / "model.safetensors").read_bytes() == before
    write([("a", torch.zeros(2, 2)), whole[1]], overwrite=True)
    assert (out / "model.safetensors").read_bytes() != before
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}
    with pytest.raises(UserError, match="could not be written"):
        write_hf_model(model_dir / "config.json/below", whole, **settings)


def test_a_run_s_model_is_its_hf(tmp_path: Path) -> None:
    for name in ("manifest.json", "metrics.jsonl"):
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=r"not finished: it has no hf/; finish it with --resume$"):
        resolve_model(str(tmp_path), option="--hf")
    checkpoint = tmp_path / "checkpoints/step_000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "complete.json").touch()
    with pytest.raises(UserError, match=f"or give its newest checkpoint, {checkpoint}$"):
        resolve_model(str(tmp_path))
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").touch()
    assert resolve_model(str(tmp_path)) == tmp_path / "hf"
    with pytest.raises(UserError, match="is a file"):
        resolve_model(str(tmp_path / "metrics.jsonl"))
