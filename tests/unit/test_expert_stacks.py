"""Experts that files stack in two tensors a layer: read, converted and written as they were."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hf_configs import hf_config
from hf_reference import hf_model
from model_tensors import all_tensors, assert_same
from safetensors.torch import load_file, save_file
from tiny_models import SHAPES, weights
from transformers import AutoModelForCausalLM, Qwen3_5MoeForConditionalGeneration

from megatron_opsft.commands.convert.run import differing_tensors, open_source, write_source
from megatron_opsft.errors import UserError
from megatron_opsft.models.storage.hf_files import HfTensors, stacks_experts
from megatron_opsft.models.storage.hf_writer import hf_layout, write_hf_model
from megatron_opsft.models.weights.expert_stacks import matrices_of, stacked
from megatron_opsft.models.weights.rectangles import Rect
from megatron_opsft.models.weights.rules import WeightTable

NAME = "qwen3_5_moe"
GATE_UP, DOWN = "model.layers.2.mlp.experts.gate_up_proj", "model.layers.2.mlp.experts.down_proj"
EXPERT = "model.layers.2.mlp.experts.5."
# As published: a head that predicts more tokens, whose experts are nobody's business here.
MTP = {
    "mtp.layers.0.mlp.experts.gate_up_proj": torch.arange(2.0 * 4 * 3).view(2, 4, 3),
    "mtp.layers.0.mlp.experts.down_proj": torch.ones(2, 3, 2),
}


@pytest.fixture(scope="module")
def stacked_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text model whose files have transformers' own parameters."""
    directory = tmp_path_factory.mktemp("stacked")
    model = hf_model(NAME)
    model.config.save_pretrained(directory)
    state = {name: parameter.data for name, parameter in model.named_parameters()}
    save_file(state, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def apart_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as transformers saves one that it has not loaded: each expert by itself."""
    directory = tmp_path_factory.mktemp("apart")
    hf_model(NAME).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("name", [NAME, "qwen3_moe"])
def test_names_and_shapes_there_and_back(name: str) -> None:
    shapes = WeightTable(SHAPES[name]).hf_shapes()
    in_files = stacked(shapes)
    assert in_files[GATE_UP] == (8, 80, 64) and in_files[DOWN] == (8, 64, 40)
    again: dict[str, tuple[int, ...]] = {}
    for tensor, shape in in_files.items():
        again |= matrices_of(tensor, shape) or {tensor: shape}
    assert again == shapes
    names = [*matrices_of(GATE_UP, (8, 80, 64))]
    assert names[10:12] == [f"{EXPERT}gate_proj.weight", f"{EXPERT}up_proj.weight"]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (GATE_UP, (8, 81, 64)),  # no gate is as large as its up
        (GATE_UP, (8, 80)),
        (f"{GATE_UP}.weight", (8, 80, 64)),
        ("mtp.layers.0.mlp.experts.gate_up_proj", (8, 80, 64)),
        ("model.layers.2.mlp.shared_expert.down_proj", (8, 64, 40)),
    ],
)
def test_what_is_no_stack(name: str, shape: tuple[int, ...]) -> None:
    assert matrices_of(name, shape) == {}


def test_slices_of_experts_are_read(stacked_dir: Path, apart_dir: Path) -> None:
    expected = weights(NAME)
    both = HfTensors(stacked_dir), HfTensors(apart_dir)
    assert [tensors.stacks_experts for tensors in both] == [True, False]
    assert both[0].shapes() == both[1].shapes()
    up, down = f"{EXPERT}up_proj.weight", f"{EXPERT}down_proj.weight"
    for tensors in both:
        assert torch.equal(tensors.read(Rect(up, 7, 21, 0, 64)), expected[up][7:21])
        assert torch.equal(tensors.read(Rect(down, 3, 64, 5, 30)), expected[down][3:, 5:30])
        rows = torch.empty(4, 40, dtype=torch.float64)
        tensors.copy_rows(down, 60, rows)
        assert torch.equal(rows, expected[down][60:].double())
    assert both[0].names_by_file() == {
        stacked_dir / "model.safetensors": set(all_tensors(stacked_dir))
    }


def test_both_forms_are_one_model_and_stay_as_they_are(
    stacked_dir: Path, apart_dir: Path, tmp_path: Path
) -> None:
    first, second = open_source(stacked_dir), open_source(apart_dir)
    assert differing_tensors(first, second) == []
    for name, source in (("first", first), ("second", second)):
        write_source(source, tmp_path / name, "megatron", max_shard_bytes=60_000, verify=True)
        stored = open_source(tmp_path / name, source.directory)
        write_source(stored, tmp_path / f"{name}_hf", "hf", max_shard_bytes=100_000, verify=True)
        assert_same(all_tensors(tmp_path / f"{name}_hf"), all_tensors(source.directory))
        model = AutoModelForCausalLM.from_pretrained(tmp_path / f"{name}_hf")
        assert_same(dict(model.named_parameters()), all_tensors(stacked_dir))
    write_source(open_source(tmp_path / "second"), tmp_path / "known", "hf")
    assert_same(all_tensors(tmp_path / "known"), all_tensors(apart_dir))
    # Others' checkpoints, and those of runs, do not say; published models are stacked.
    (tmp_path / "second/conversion.json").unlink()
    write_source(open_source(tmp_path / "second"), tmp_path / "alone", "hf")
    assert_same(all_tensors(tmp_path / "alone"), all_tensors(stacked_dir))


def test_a_model_that_sees(stacked_dir: Path, tmp_path: Path) -> None:
    """As 35B-A3B is published; multi-token prediction and vision come along as they are."""
    shape = replace(SHAPES[NAME], architecture="Qwen3_5MoeForConditionalGeneration")
    config = hf_config(shape)
    config.vision_config.out_hidden_size = shape.hidden_size
    model = Qwen3_5MoeForConditionalGeneration(config)
    directory = tmp_path / "model"
    model.config.architectures = [shape.architecture]
    model.config.save_pretrained(directory)
    state = {name: value.detach().clone() for name, value in model.named_parameters()} | MTP
    save_file(state, directory / "model.safetensors", {"format": "pt"})

    source = open_source(directory)
    assert source.table.shape == shape
    write_source(source, tmp_path / "megatron", "megatron", max_shard_bytes=60_000, verify=True)
    stored = open_source(tmp_path / "megatron")
    write_source(stored, tmp_path / "hf", "hf", verify=True)
    assert_same(all_tensors(tmp_path / "hf"), state)


def test_a_stream_of_experts_in_any_order_fills_the_stacks(
    stacked_dir: Path, tmp_path: Path
) -> None:
    table = WeightTable(SHAPES[NAME])
    assert stacks_experts(table, stacked_dir)
    write_hf_model(
        tmp_path / "out",
        reversed(weights(NAME).items()),
        shapes=table.hf_shapes(),
        dtype=torch.float32,
        source_dir=stacked_dir,
        stack_experts=True,
    )
    assert_same(all_tensors(tmp_path / "out"), all_tensors(stacked_dir))


def test_a_stack_has_one_dtype() -> None:
    shapes = WeightTable(SHAPES[NAME]).hf_shapes()
    dtypes = dict.fromkeys(shapes, torch.float32) | {f"{EXPERT}up_proj.weight": torch.bfloat16}
    hf_layout(shapes, dtypes, 10**9)
    with pytest.raises(UserError, match=f"experts of {GATE_UP} have several dtypes; give --dtype"):
        hf_layout(shapes, dtypes, 10**9, stack_experts=True)


def test_a_stack_of_another_size_is_named(stacked_dir: Path, tmp_path: Path) -> None:
    state = load_file(stacked_dir / "model.safetensors")
    (tmp_path / "config.json").write_bytes((stacked_dir / "config.json").read_bytes())
    for changed, message in (
        (state[GATE_UP][:7], "missing .*layers.2.mlp.experts.7.gate_proj.weight"),
        (state[GATE_UP][:, :78], r"experts.0.gate_proj.weight has shape \[39, 64\]"),
        (state[GATE_UP][:, :79], f"unexpected {GATE_UP}"),
    ):
        save_file(state | {GATE_UP: changed.contiguous()}, tmp_path / "model.safetensors")
        with pytest.raises(UserError, match=message):
            open_source(tmp_path)


def test_the_config_of_a_mixture_with_a_shared_expert(apart_dir: Path, tmp_path: Path) -> None:
    config = json.loads((apart_dir / "config.json").read_text())
    for name in ("intermediate_size", "norm_topk_prob"):  # published ones have neither
        del config[name]

    def read(**changes: object) -> object:
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        return open_source(tmp_path).table.shape

    (tmp_path / "model.safetensors").symlink_to(apart_dir / "model.safetensors")
    assert read() == replace(SHAPES[NAME], ffn_size=40)
    for changes, message in (
        ({"norm_topk_prob": False}, "norm_topk_prob=false is not supported"),
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size must be"),
        ({"shared_expert_intermediate_size": 60}, "shared_expert.* has shape"),
    ):
        with pytest.raises(UserError, match=message):
            read(**changes)
