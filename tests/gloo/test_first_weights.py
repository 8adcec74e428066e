"""What an engine that has read the first weights holds at other places than it says is noticed
before anything is sampled. That the weights are the same bits as from disk: tests/vllm.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from hf_reference import hf_model
from jobs import Case, build
from safetensors.torch import load_file, save_file
from tiny_models import weights
from world import World

from megatron_opsft.config import SyncConfig
from megatron_opsft.errors import SyncError
from megatron_opsft.model.load import TrainerParts
from megatron_opsft.rollout.hf.engine import HfEngine
from megatron_opsft.storage.hf_files import HfTensors
from megatron_opsft.sync.transfer import Transfer
from megatron_opsft.sync.weight_sync import WeightSync, load_first_weights
from megatron_opsft.weights.rectangles import Copy, Parameter, Rect

GATE, UP = (f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up"))


class ReadingEngine(HfEngine):
    """An engine that reads files, on Hugging Face's model."""

    def load_files(self, files: Sequence[Path], version: int) -> None:
        self.load_weights(((n, t) for file in files for n, t in load_file(file).items()), version)


def build_parts(case: Case, model_dir: Path) -> tuple[TrainerParts, WeightSync, ReadingEngine]:
    """A trainer with spoilt weights, the sync, and an engine that can read the files."""
    built = build(case)
    for tensor in built.shards.by_name.values():
        tensor.fill_(7.0)
    model = hf_model(case.model)
    for value in model.parameters():
        value.data.fill_(5.0)
    engine = ReadingEngine(model, None, batch_size=8, version=None)  # type: ignore[arg-type]
    sync = WeightSync(built.shards, engine, SyncConfig(verify="checksum"), built.trainer.score)
    stored = HfTensors(model_dir)
    parts = TrainerParts(trainer=built.trainer, shards=built.shards, stored=stored)
    return parts, sync, engine


def wrongly_pulled(case: Case, model_dir: Path) -> str:
    """One weight changes on its way from the engine."""
    parts, sync, engine = build_parts(case, model_dir)
    run = Transfer.run

    def spoiling(transfer: Transfer) -> None:
        run(transfer)
        for rule, tensor in parts.shards.parameters:
            if GATE in rule.hf_names:
                tensor[0] *= 1.01  # the first row is the gate's

    with mock.patch.object(Transfer, "run", spoiling), pytest.raises(SyncError) as caught:
        load_first_weights(parts, sync, engine)
    return str(caught.value)


def at_another_place(case: Case, model_dir: Path) -> tuple[bool, str]:
    """The engine's layout takes one weight for another: whether the trainer's is wrong after the
    pull, and what the first push says.
    """
    parts, sync, engine = build_parts(case, model_dir)
    layout, other = engine.layout, {GATE: UP, UP: GATE}

    def swapped(parameter: Parameter) -> Parameter:
        def named(rect: Rect) -> Rect:
            return replace(rect, tensor=other.get(rect.tensor, rect.tensor))

        turned = tuple(Copy(named(part.source), part.target) for part in parameter.parts)
        return replace(parameter, parts=turned)

    engine.layout = replace(
        layout, parameters_of=lambda rank: tuple(map(swapped, layout.parameters_of(rank)))
    )
    load_first_weights(parts, sync, engine)
    found = dict(sync.exporter.stream())
    with pytest.raises(SyncError) as caught:
        sync.push(0)
    return torch.equal(found[GATE], weights(case.model)[UP]), str(caught.value)


def test_what_is_read_wrongly_stops_the_run(world: World, tmp_path: Path) -> None:
    save_file(weights("qwen2"), tmp_path / "model.safetensors")
    case = Case(tp=2)
    for said in world.run(wrongly_pulled, 2, case, tmp_path):
        assert said.startswith(f"pull: the engine of rank 0 does not hold the trainer's {GATE} ")
    for is_swapped, said in world.run(at_another_place, 2, case, tmp_path):
        assert is_swapped
        assert said.startswith("sync of weight version 0: the engine of rank 0 does not hold ")
        assert GATE in said and UP in said
