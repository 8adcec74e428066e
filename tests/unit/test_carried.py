"""A model that also sees: its vision and its multi-token prediction go through every copy."""

import json
import os
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from forked_cli import ForkedCli
from hf_configs import hf_config
from model_tensors import all_tensors, assert_same
from safetensors.torch import load_file, save_file
from small_run import QUICKSTART, SMALL_RUN
from tiny_models import SHAPES, weight
from torch import Tensor
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration, Qwen3_5VisionConfig

from megatron_opsft.commands.convert.run import (
    differing_tensors,
    open_merged,
    open_source,
    write_source,
)
from megatron_opsft.config import LoraConfig, ModelConfig
from megatron_opsft.config.load import load_config
from megatron_opsft.errors import UserError
from megatron_opsft.models.architectures.config_from_hf import read_model_shape
from megatron_opsft.models.architectures.shape import ModelShape
from megatron_opsft.models.storage.adapter_config import adapter_config_json
from megatron_opsft.models.storage.adapters import adapter_files
from megatron_opsft.models.storage.hf_writer import side_files
from megatron_opsft.models.storage.model_identity import combined, hash_model_files
from megatron_opsft.models.storage.model_paths import resolve_model
from megatron_opsft.models.weights.lora import adapters_of_rules
from megatron_opsft.models.weights.rectangles import whole
from megatron_opsft.models.weights.rules import WeightTable
from megatron_opsft.run.start.disk import disk_use

MTP = {
    "mtp.fc.weight": torch.arange(64.0 * 128).view(64, 128).bfloat16(),
    "mtp.layers.0.self_attn.q_norm.weight": torch.full((24,), 1.5),
    "mtp.norm.weight": torch.linspace(0, 1, 64).half(),
    "mtp.scale": torch.tensor(0.25),
}
Model = tuple[Path, dict[str, Tensor]]  # a directory, and what it holds
FLOAT32 = ("A_log", "linear_attn.norm.weight")


def save_model(directory: Path, shape: ModelShape = SHAPES["qwen3_5"]) -> dict[str, Tensor]:
    """A directory as published ones are: bfloat16, with a few float32 tensors; its tensors."""
    vision = Qwen3_5VisionConfig(
        depth=1, hidden_size=32, num_heads=2, intermediate_size=48, out_hidden_size=64
    )
    text = hf_config(shape)
    model = Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(text_config=text.to_dict(), vision_config=vision.to_dict())
    )
    model.save_pretrained(directory, max_shard_size="200KB")
    saved = {}
    for file in sorted(directory.glob("*.safetensors")):
        saved |= load_file(file)
        file.unlink()
    (directory / "model.safetensors.index.json").unlink()
    for name, value in saved.items():
        if value.dim() > 1:
            saved[name] = weight(name, tuple(value.shape))
    tensors = {
        name: value.float() if name.endswith(FLOAT32) else value.bfloat16()
        for name, value in (saved | MTP).items()
    } | MTP
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["dtype"] = config["text_config"]["dtype"] = "bfloat16"
    (directory / "config.json").write_text(json.dumps(config))
    return tensors


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory = tmp_path_factory.mktemp("vision")
    return directory, save_model(directory)


def test_there_and_back_is_bit_identical(model: Model, tmp_path: Path) -> None:
    directory, tensors = model
    assert sum(name.startswith("model.visual.") for name in tensors) > 10
    source = open_source(directory)
    write_source(source, tmp_path / "megatron", "megatron", max_shard_bytes=60_000, verify=True)
    stored = open_source(tmp_path / "megatron")
    assert differing_tensors(source, stored) == []
    write_source(stored, tmp_path / "hf", "hf", max_shard_bytes=60_000, verify=True)
    assert_same(all_tensors(tmp_path / "hf"), tensors)
    loaded, info = Qwen3_5ForConditionalGeneration.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert loaded.config.text_config.num_hidden_layers == 8


def test_a_change_of_vision_is_a_difference(model: Model, tmp_path: Path) -> None:
    directory, tensors = model
    name = next(name for name in tensors if name.startswith("model.visual."))
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    save_file(tensors | {name: tensors[name] + 1}, tmp_path / "model.safetensors", {"format": "pt"})
    lines = differing_tensors(open_source(directory), open_source(tmp_path))
    assert lines == [f"{name}: other values"]


def test_a_dtype_that_is_asked_for_leaves_them_as_they_are(
    cli: ForkedCli, model: Model, tmp_path: Path
) -> None:
    directory, tensors = model
    words = ["convert", "to-megatron", "--hf", directory, "--out", tmp_path / "megatron"]
    assert cli.run([*words, "--dtype", "float32", "--verify"]).exit_code == 0
    words = ["convert", "to-hf", "--megatron", tmp_path / "megatron", "--out", tmp_path / "hf"]
    assert cli.run([*words, "--verify"]).exit_code == 0
    table = WeightTable(read_model_shape(directory))
    expected = {
        name: value if table.is_carried(name) else value.float() for name, value in tensors.items()
    }
    assert_same(all_tensors(tmp_path / "hf"), expected)
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert config["dtype"] == config["text_config"]["dtype"] == "float32"


def test_what_belongs_to_no_part_of_the_model_is_refused(model: Model, tmp_path: Path) -> None:
    directory, tensors = model
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    others = tensors | {"model.audio.weight": torch.zeros(2)}
    save_file(others, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"unexpected model\.audio\.weight"):
        open_source(tmp_path)


def test_a_run_gives_them_to_its_model_and_its_checkpoints(cli: ForkedCli, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    tensors = save_model(
        directory, replace(SHAPES["qwen3_5"], vocab_size=640, max_position_embeddings=1024)
    )
    for file in resolve_model("tiny_reasoner").glob("*token*"):
        shutil.copy(file, directory)
    shutil.copy(resolve_model("tiny_reasoner") / "chat_template.jinja", directory)
    run_dir = tmp_path / "run"
    run_words = [f"model.path={directory}", f"run.dir={run_dir}", *SMALL_RUN]
    run_words += [
        "checkpoint.every=1",
        "rollout.max_response_tokens=8",
        "optimizer.schedule=constant",
    ]
    run_words += ["run.eval_every=1", "eval.export_best=true"]
    ended = cli.run(["train", QUICKSTART, *run_words, "run.steps=2"])
    assert ended.exit_code == 0, ended.stderr
    table = WeightTable(read_model_shape(directory))
    carried = {name: value for name, value in tensors.items() if table.is_carried(name)}
    first, second = sorted((run_dir / "checkpoints").iterdir())
    assert (first / "carried.safetensors").samefile(second / "carried.safetensors")
    words = ["convert", "to-hf", "--megatron", second, "--out", tmp_path / "converted"]
    ended = cli.run(words)
    assert ended.exit_code == 0, ended.stderr
    # With export_best, hf/ is a copy of what best/ had.
    for model in (run_dir / "hf", tmp_path / "converted"):
        found = all_tensors(model)
        assert found.keys() == tensors.keys()
        assert_same({name: found[name] for name in carried}, carried)
    _, info = Qwen3_5ForConditionalGeneration.from_pretrained(
        run_dir / "hf", output_loading_info=True
    )
    assert not info["missing_keys"]

    damaged = second / "carried.safetensors"
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))  # also under its other name
    resumed = cli.run(["train", QUICKSTART, *run_words, "run.steps=3", "--resume"])
    assert resumed.exit_code == 0, resumed.stderr
    assert f"{damaged} is damaged: its checksum differs; it is written again" in resumed.stderr
    assert damaged.read_bytes() == content
    assert (run_dir / "checkpoints/step_000003/carried.safetensors").read_bytes() == content


def test_a_checkpoint_without_them_takes_them_from_the_named_model(
    model: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If it has them: its config.json alone is enough, with a warning."""
    directory, tensors = model
    megatron, alone = tmp_path / "megatron", tmp_path / "alone"
    write_source(open_source(directory), megatron, "megatron")
    (megatron / "carried.safetensors").unlink()
    carried = open_source(directory).carried
    assert differing_tensors(open_source(directory), open_source(megatron)) == [
        f"{name}: only in {directory}" for name in sorted(carried)
    ]
    write_source(open_source(megatron, directory), tmp_path / "hf", "hf")
    assert_same(all_tensors(tmp_path / "hf"), tensors)
    alone.mkdir()
    shutil.copy(directory / "config.json", alone)
    caplog.clear()
    write_source(open_source(megatron, alone), tmp_path / "language", "hf")
    assert f"{megatron}: no tensors of vision or multi-token prediction were found" in caplog.text
    assert all_tensors(tmp_path / "language").keys() == tensors.keys() - carried.keys()


def test_a_merged_adapter_leaves_them_as_they_are(model: Model, tmp_path: Path) -> None:
    directory, tensors = model
    lora, adapter = LoraConfig(rank=2, alpha=4.0), tmp_path / "adapter"
    table = WeightTable(read_model_shape(directory), "te")
    values = {}
    for rule in adapters_of_rules(table.exported, lora):
        values |= {name: weight(name, shape) for name, shape in rule.hf_shapes.items()}
    config = adapter_config_json(ModelConfig(path=str(directory)), lora, directory)
    adapter.mkdir()
    for file, content in adapter_files(values.items(), config).items():
        (adapter / file).write_bytes(content)
    write_source(open_merged(adapter), tmp_path / "hf", "hf")
    found = all_tensors(tmp_path / "hf")
    changed = {name for name, value in found.items() if not torch.equal(value, tensors[name])}
    assert changed and not any(map(table.is_carried, changed))
    unchanged = tensors.keys() - changed
    assert_same({n: found[n] for n in unchanged}, {n: tensors[n] for n in unchanged})
    assert found.keys() == tensors.keys()


def test_sections_of_two_dtypes_are_no_tensor(model: Model, tmp_path: Path) -> None:
    """Another program may have stored a delta net's keys in another dtype than its queries."""
    megatron, name = tmp_path / "megatron", "model.language_model.layers.0.linear_attn."
    write_source(open_source(model[0]), megatron, "megatron")
    source = open_source(megatron)
    key = "decoder.layers.0.self_attention.in_proj.weight.key"
    stored = source.tensors._stored  # type: ignore[union-attr]
    stored[key] = stored[key]._replace(dtype=torch.float32)
    with pytest.raises(
        UserError,
        match=rf"{key} is torch.float32, but .*query is torch.bfloat16, "
        rf"and both are in {name}in_proj_qkv.weight; give --dtype",
    ):
        source.dtypes()
    assert source.dtypes("float16")[f"{name}in_proj_qkv.weight"] is torch.float16
    # Training casts what it reads.
    qkv = f"{name}in_proj_qkv.weight"
    read = source.tensors.read(whole(qkv, source.shapes()[qkv]))
    assert read.dtype is torch.float32


def test_they_are_part_of_what_the_model_is_and_takes(model: Model, tmp_path: Path) -> None:
    directory, _ = model
    megatron, shape = tmp_path / "megatron", read_model_shape(directory)
    write_source(open_source(directory), megatron, "megatron")
    size = sum(region.num_bytes for region in open_source(directory).carried.values())
    assert size > 10_000
    for path, rank in product((directory, megatron), (0, 2)):
        use, without = (
            disk_use(
                load_config(Path(QUICKSTART), [f"model.path={place}", f"lora.rank={rank}"]), shape
            )
            for place in (path, "some/where")
        )
        assert use.checkpoint - without.checkpoint == (0 if rank else size)
        assert use.model - without.model == size
    before = combined(hash_model_files(megatron, {}))
    with (megatron / "carried.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        (last,) = file.read()
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    assert combined(hash_model_files(megatron, {})) != before


def test_what_prepares_images_is_copied_too(model: Model, tmp_path: Path) -> None:
    source = shutil.copytree(model[0], tmp_path / "model")
    names = {f"{kind}preprocessor_config.json" for kind in ("", "video_")}
    for name in names:
        (source / name).write_text(name)
    files = side_files(source, torch.bfloat16)
    assert {name for name in files if files[name].decode() == name} == names
