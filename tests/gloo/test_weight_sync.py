"""Weights out of the shards and back, bit for bit, into a real rollout engine and from it.

That the first weights are the same bits from an engine as from disk: tests/vllm.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from hf_reference import hf_model, response_log_prob
from jobs import NUM_ROLLOUTS, Built, Case, build, exported, train_steps
from safetensors.torch import load_file, save_file
from tiers import for_release
from tiny_models import samples, weights
from torch import Tensor
from world import World

from megatron_opsft.config import SyncConfig
from megatron_opsft.errors import SyncError
from megatron_opsft.models.storage.hf_files import HfTensors
from megatron_opsft.models.weights.rectangles import Copy, Parameter, Rect
from megatron_opsft.rollout.engine import EngineShare
from megatron_opsft.rollout.hf.engine import HfEngine
from megatron_opsft.run.sync.transfer import Transfer
from megatron_opsft.run.sync.weight_sync import WeightSync, load_first_weights
from megatron_opsft.runtime.distributed import gather_from_all
from megatron_opsft.trainer.model.load import TrainerParts

LAYOUTS = [
    Case(tp=2, pp=2, vpp=2),
    Case(model="llama_mha", tp=4),
    Case(model="qwen2_tied", tp=2, pp=2),
    Case(model="llama3", pp=4, dtype="bfloat16"),
    Case(model="mistral", tp=2),
    Case(model="qwen3_5", tp=2, pp=2),
    Case(model="qwen3_5_tied", pp=2, vpp=2, dtype="bfloat16"),
    Case(model="qwen3_moe_unnormalized", pp=2, dp=2, ep=2),
    Case(model="qwen3_moe", tp=2, ep=2, etp=1, sequence_parallel=True, dtype="bfloat16"),
    Case(model="qwen3_5_moe", tp=2, dp=2, ep=2, sequence_parallel=True),
    *for_release(
        [
            Case(dp=2),
            Case(model="llama_mha"),
            Case(model="qwen2_tied", pp=2, vpp=2),
            Case(model="qwen3", tp=2, pp=2, dtype="bfloat16"),
            Case(model="qwen3_moe", tp=2, pp=2, sequence_parallel=True),
            Case(model="qwen3_moe", tp=2, dp=2, ep=2, sequence_parallel=True),
        ]
    ),
]
SYNCED = [
    Case(pp=2, vpp=2),
    Case(tp=2, cp=2),
    Case(model="qwen2_tied", pp=2, dp=2),
    Case(model="qwen3_yarn", tp=2),
    Case(model="qwen3_5", tp=2, pp=2),
    Case(model="qwen3_moe", tp=2, pp=2, sequence_parallel=True),
    Case(model="qwen3_5_moe", tp=2, dp=2, ep=2, sequence_parallel=True),
    *for_release(
        [
            Case(),
            Case(model="qwen2_tied", tp=2, pp=2),
            Case(model="qwen3_5_tied", pp=2),
            Case(model="qwen3_moe"),
            Case(model="qwen3_moe", tp=2, dp=2, ep=2, sequence_parallel=True),
            Case(model="qwen3_moe", pp=2, dp=2, ep=2),
            Case(model="qwen3_moe", tp=2, dp=4, ep=8, etp=1, sequence_parallel=True),
        ]
    ),
]
PROBES = samples(4, seed=3)


def export_after_load(case: Case) -> tuple[list[str], bool]:
    """Names in the order of the stream, and whether every value is the loaded one."""
    built = build(case)
    found = exported(built)
    dtype = built.shards.parameters[0][1].dtype
    expected = weights(case.model)
    return list(found), all(
        found[name].dtype == dtype and torch.equal(found[name], expected[name].to(dtype))
        for name in expected
    )


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_exported_weights_are_the_loaded_ones_bit_for_bit(world: World, case: Case) -> None:
    for names, equal in world.run(export_after_load, case.world_size, case):
        assert names == list(weights(case.model))
        assert equal


def differences(built: Built, engine: HfEngine) -> tuple[float, float]:
    """Mean and maximum between trainer and engine over the probes' tokens of all ranks."""
    pairs = zip(built.trainer.score(PROBES), engine.score(PROBES).log_probs, strict=True)
    mine = [abs(a - b) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True)]
    everyone = gather_from_all(mine)
    return sum(everyone) / len(everyone), max(everyone)


class ReadingEngine(HfEngine):
    """An engine that reads files, on Hugging Face's model."""

    def copy_files(self, names_by_file: Mapping[Path, Collection[str]]) -> None:
        read = ((load_file(file), names) for file, names in names_by_file.items())
        self.copy_weights((n, held[n]) for held, names in read for n in names)


def sync_of(built: Built, model: str) -> tuple[WeightSync, ReadingEngine]:
    """With an engine without weights."""
    share = EngineShare(index=0, count=1)
    engine = ReadingEngine(hf_model(model), None, 8, version=None, share=share)  # type: ignore[arg-type]
    return WeightSync(built.shards, engine, SyncConfig(bucket_mb=1), built.trainer.score), engine


def push_and_pull(case: Case) -> tuple[float, float]:
    """Train, push, spoil the shards, pull; the loss of the trainer and that of the engine."""
    built = build(case)
    train_steps(built, case, range(2))
    sync, engine = sync_of(built, case.model)
    for version, path in ((1, "stream"), (2, "in_place")):
        for value in engine.weights().values():
            value.fill_(5.0)
        pushed = sync.push(version, PROBES)
        expected = exported(built)
        assert pushed.path == path
        assert engine.version == pushed.version == sync.version == version
        mean, largest = differences(built, engine)
        assert pushed.logprob_diff_mean == pytest.approx(mean, rel=1e-9, abs=0)
        assert pushed.logprob_diff_max == largest < 1e-4
        assert len(set(gather_from_all([pushed.logprob_diff_mean]))) == 1
        for name, value in engine.weights().items():
            assert torch.equal(value, expected[name]), name

    (result,) = train_steps(built, case, range(2, 3))
    for _, parameter in built.shards.parameters:
        parameter.fill_(7.0)
    sync.pull()
    pulled = exported(built)
    for name, value in expected.items():
        assert torch.equal(pulled[name], value), name

    accepted = samples(case.num_samples, seed=2)
    with torch.inference_mode():
        total = sum(float(response_log_prob(engine.model, sample)) for sample in accepted)
    longest = max(len(sample.response_ids) for sample in accepted)
    return result.loss, -total / (NUM_ROLLOUTS * longest)


@pytest.mark.parametrize("case", SYNCED, ids=str)
def test_push_reaches_the_engine_and_pull_brings_it_back(world: World, case: Case) -> None:
    for loss, engine_loss in world.run(push_and_pull, case.world_size, case):
        assert engine_loss == pytest.approx(loss, rel=1e-5)


SPOILED = "decoder.layers.2.mlp.experts.local_experts.5.linear_fc2.weight"


def spoil_an_expert(case: Case) -> str:
    """What is said when one element of one shard of expert 5 is not what was pushed."""
    built = build(case)
    sync, _ = sync_of(built, case.model)
    sync.push(1)
    shard = built.layout.shard(is_expert=True)
    spoiled = built.shards.by_name.get(SPOILED)
    if spoiled is not None and shard.tp_rank == 0:  # all copies of one part
        spoiled[3, 7] += 1e-3
    with pytest.raises(SyncError) as caught:
        sync.compare_checksums("push")
    return str(caught.value)


def test_a_spoiled_expert_is_named_on_every_rank(world: World) -> None:
    case = Case(model="qwen3_moe", tp=2, dp=2, ep=2, sequence_parallel=True)
    for said in world.run(spoil_an_expert, 4, case):
        assert "does not hold the trainer's model.layers.2.mlp.experts.5.down_proj.weight (" in said


def push_weights_with_a_nan(case: Case) -> str:
    """What is said when the engine gets exactly the trainer's weights, and one of them is NaN."""
    built = build(case)
    sync, _ = sync_of(built, case.model)
    sync.push(1, PROBES)
    norm = next(t for name, t in built.shards.by_name.items() if "layernorm" in name)
    norm[3] = float("nan")
    with pytest.raises(SyncError) as caught:
        sync.push(2, PROBES)
    return str(caught.value)


def test_log_probs_of_a_push_that_are_nan_are_an_error_and_no_alarm(world: World) -> None:
    for said in world.run(push_weights_with_a_nan, 2, Case(tp=2)):
        assert said.startswith("sync of weight version 2: log-probs of the engine or the trainer")


GATE, UP = (f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up"))


def build_parts(case: Case, model_dir: Path) -> tuple[TrainerParts, WeightSync, ReadingEngine]:
    """A trainer with spoilt weights, the sync, and an engine that can read the files."""
    built = build(case)
    for tensor in built.shards.by_name.values():
        tensor.fill_(7.0)
    sync, engine = sync_of(built, case.model)
    for value in engine.weights().values():
        value.fill_(5.0)
    stored = HfTensors(model_dir)
    parts = TrainerParts(trainer=built.trainer, shards=built.shards, stored=stored)
    return parts, sync, engine


def wrongly_pulled(case: Case, model_dir: Path) -> str:
    """One weight changes on its way from the engine."""
    parts, sync, engine = build_parts(case, model_dir)
    run = Transfer.run

    def spoiling(transfer: Transfer, sources: Mapping[str, Tensor]) -> None:
        run(transfer, sources)
        for rule, tensor in parts.shards.parameters:
            if GATE in rule.hf_shapes:
                tensor[0] *= 1.01  # the first row is the gate's

    with mock.patch.object(Transfer, "run", spoiling), pytest.raises(SyncError) as caught:
        load_first_weights(parts, sync, by_engine=True)
    return str(caught.value)


def at_another_place(case: Case, model_dir: Path) -> tuple[bool, str]:
    """The engine's layout takes one weight for another: whether the trainer's is wrong after the
    pull, and what the first push says.
    """
    parts, sync, engine = build_parts(case, model_dir)
    layout, other = engine.layout, {GATE: UP, UP: GATE}

    def swapped(parameter: Parameter) -> Parameter:
        def named(rect: Rect) -> Rect:
            return rect._replace(tensor=other.get(rect.tensor, rect.tensor))

        turned = tuple(Copy(named(part.source), part.target) for part in parameter.copies)
        return parameter._replace(copies=turned)

    engine.layout = replace(
        layout, parameters_of=lambda rank: tuple(map(swapped, layout.parameters_of(rank)))
    )
    load_first_weights(parts, sync, by_engine=True)
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
