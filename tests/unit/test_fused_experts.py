"""Experts of the rollout model under the names that transformers gives them on disk."""

from pathlib import Path

import pytest
import torch
from hf_engines import engine_from_disk
from hf_reference import hf_model, hf_weights
from safetensors.torch import load_file
from tiny_models import SHAPES

from megatron_opsft.architectures.config_from_hf import read_model_shape
from megatron_opsft.rollout.engine import SamplingSettings
from megatron_opsft.rollout.hf.engine import HfEngine
from megatron_opsft.rollout.requests import make_requests


class NoText:
    """The texts do not matter here."""

    def batch_decode(self, sequences: list[list[int]], **kwargs: bool) -> list[str]:
        return [""] * len(sequences)


@pytest.mark.parametrize("name", ["mistral", "qwen3_moe", "qwen3_moe_unnormalized"])
def test_names_and_values_are_those_of_the_saved_files(name: str, tmp_path: Path) -> None:
    model = hf_model(name)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    own = hf_weights(model)
    assert own.keys() == saved.keys()
    assert all(torch.equal(own[key], saved[key]) for key in saved)
    assert read_model_shape(tmp_path) == SHAPES[name]


def test_engine_of_experts_loads_and_hands_out_each_experts_own_tensors(tmp_path: Path) -> None:
    hf_model("qwen3_moe").save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    loaded, empty = (
        make(tmp_path, NoText(), dtype=torch.float32, device="cpu", batch_size=8)
        for make in (engine_from_disk, HfEngine.from_config)
    )
    last = "model.layers.3.mlp.experts.7.up_proj.weight"
    with pytest.raises(ValueError, match=f"1 weights were not sent: {last}"):
        empty.load_weights(((k, v) for k, v in saved.items() if k != last), version=1)
    empty.load_weights(iter(saved.items()), version=2)
    held = empty.weights().tensors
    assert held.keys() == saved.keys()
    assert all(torch.equal(held[key], saved[key]) for key in saved)
    requests = [
        request
        for i in range(2)
        for request in make_requests(f"p{i}", [5, 6, 7 + i], 3, run_seed=0, step=0)
    ]
    settings = SamplingSettings(
        temperature=1.0, top_p=1.0, max_response_tokens=12, end_token_ids=(0,)
    )
    rollouts = [engine.generate(requests, settings) for engine in (loaded, empty)]
    ids = [[rollout.response_ids for rollout in part] for part in rollouts]
    assert ids[0] == ids[1] and len(ids[0]) == 6
