"""Distributed checkpoints: the same run in another layout, and damage that is noticed."""

from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import Built, Case, as_arrays, build, exported, train_steps
from tiers import for_release
from tiny_models import rounding
from world import World

from megatron_opsft.config import LoraConfig
from megatron_opsft.errors import UserError
from megatron_opsft.models.storage.dist_metadata import locate, read_metadata
from megatron_opsft.records import StepResult
from megatron_opsft.runtime.durable import COMPLETE, list_checkpoints
from megatron_opsft.trainer.model.checkpoint import Checkpointer
from megatron_opsft.trainer.model.checkpoint_share import describe_models, own_share
from megatron_opsft.trainer.model.reference import ReferenceModel

LORA = LoraConfig(rank=4, alpha=8.0)
Outcome = tuple[list[StepResult], dict[str, Any], dict[str, Any]]


def checkpointer(
    built: Built, directory: Path, reference: ReferenceModel | None = None
) -> Checkpointer:
    models, optimizer = built.trainer.models, built.trainer.optimizer
    return Checkpointer(directory, models, optimizer, keep=2, reference=reference)


def save_after_a_step(case: Case, directory: Path) -> Outcome:
    """An update, a checkpoint in the background of two more; their results, the weights saved and
    the last ones.
    """
    built = build(case)
    train_steps(built, case, range(1))
    saved = as_arrays(exported(built))
    saver = checkpointer(built, directory)
    saver.start(1, {"config_hash": "abc"})
    results = train_steps(built, case, range(1, 3))
    assert saver.finish() is None
    return results, saved, as_arrays(exported(built))


def load_and_go_on(case: Case, directory: Path) -> Outcome:
    """The same two further updates, in a fresh model."""
    built = build(case)
    manifest = checkpointer(built, directory).load_newest()
    assert manifest is not None and (manifest["step"], manifest["config_hash"]) == (1, "abc")
    loaded = as_arrays(exported(built))
    results = train_steps(built, case, range(1, 3))
    return results, loaded, as_arrays(exported(built))


def weights_and_reference(case: Case, directory: Path, saves: bool) -> tuple[dict[str, Any], ...]:
    """Weights of the model and of its reference, which was replaced after one update of two: of one
    that is saved, or of a fresh one that has loaded it.
    """
    built = build(case)
    reference = ReferenceModel(built.trainer, case.device)
    saver = checkpointer(built, directory, reference)
    if saves:
        train_steps(built, case, range(1))
        reference.replace()
        train_steps(built, case, range(1, 2))
        saver.save(2, {})
    else:
        saver.load_newest()
    assert reference.is_replaced
    with reference.in_place():
        frozen = as_arrays(exported(built))
    return as_arrays(exported(built)), frozen


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one)


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(pp=2, vpp=2),
        Case(cp=2, dp=2, dtype="bfloat16"),
        Case(model="qwen3_moe", dp=4, ep=2, dtype="bfloat16", lora=LORA),
        Case(tp=2, pp=2, vpp=2, sequence_parallel=True, lora=LORA),
        Case(model="qwen3_5", tp=2, pp=2, dtype="bfloat16"),
        Case(model="qwen3_5_moe", dp=4, ep=2, dtype="bfloat16"),
        *for_release(
            [
                Case(tp=2, pp=2),
                Case(dp=4),
                Case(tp=2, dp=2, dtype="bfloat16"),
                Case(model="qwen3_moe", dp=4, ep=2, dtype="bfloat16"),
                Case(model="qwen3_5", dp=4),
            ]
        ),
    ],
    ids=str,
)
def test_resumed_run_is_bit_identical_in_the_same_layout(
    world: World, case: Case, tmp_path: Path
) -> None:
    results, saved, last = world.run(save_after_a_step, case.world_size, case, tmp_path)[0]
    again, loaded, last_again = world.run(load_and_go_on, case.world_size, case, tmp_path)[0]
    assert same(loaded, saved) and again == results and same(last_again, last)


SP, EP = Case(model="qwen3_moe", sequence_parallel=True), Case(model="qwen3_moe")
DELTA = Case(model="qwen3_5")
HALF, TIED = Case(dtype="bfloat16"), Case(model="qwen2_tied")
ADAPTED = replace(HALF, lora=LORA)
OTHERS: list[dict[str, int]] = [{}, {"tp": 2}, {"dp": 4}, {"pp": 2, "dp": 2}, {"tp": 2, "dp": 2}]


@pytest.mark.parametrize(
    ("first", "others"),
    [
        (replace(HALF, tp=2, pp=2), [HALF, replace(HALF, tp=2, dp=2)]),
        (replace(TIED, tp=2, pp=2), [replace(TIED, pp=2, dp=2)]),
        (replace(DELTA, tp=2, pp=2), [replace(DELTA, tp=2)]),
        (replace(DELTA, dp=4), [replace(DELTA, pp=2, vpp=2)]),
        (Case(cp=2, tp=2), [Case()]),
        (Case(dp=2), [Case(cp=2)]),
        (replace(ADAPTED, tp=2, pp=2), [replace(ADAPTED, dp=4)]),
        (replace(SP, tp=2, pp=2), [replace(SP, dp=2, pp=2)]),
        (replace(EP, dp=2, ep=2, lora=LORA), [replace(SP, ep=2, tp=2, etp=1, lora=LORA)]),
        (replace(EP, dp=2, ep=2), [replace(EP, dp=4, ep=4), replace(SP, ep=2, tp=2, etp=1)]),
        *for_release(
            [
                (replace(case, tp=2, pp=2), [replace(case, **other) for other in OTHERS])
                for case in (HALF, TIED, DELTA, ADAPTED)
            ]
        ),
        *for_release(
            [
                (replace(SP, tp=2, pp=2), [SP, replace(SP, tp=2)]),
                (replace(EP, dp=2, ep=2, lora=LORA), [replace(EP, lora=LORA)]),
                (replace(EP, dp=2, ep=2), [EP]),
            ]
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, Case) else None,
)
def test_checkpoint_goes_on_in_other_layouts(
    world: World, first: Case, others: list[Case], tmp_path: Path
) -> None:
    results, saved, _ = world.run(save_after_a_step, first.world_size, first, tmp_path)[0]
    tolerance = rounding(first.model) if first.dtype == "float32" else 0.02
    for case in others:
        again, loaded, _ = world.run(load_and_go_on, case.world_size, case, tmp_path)[0]
        assert same(loaded, saved)
        for before, now in zip(results, again, strict=True):
            assert now.loss == pytest.approx(before.loss, rel=tolerance)
            assert now.grad_norm == pytest.approx(before.grad_norm, rel=tolerance)


def load_and_save(case: Case, directory: Path, other: Path) -> None:
    """What was saved, saved again by a fresh model of another layout."""
    built = build(case)
    assert checkpointer(built, directory).load_newest() is not None
    checkpointer(built, other).save(1, {})


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the only checkpoint there: weights, main weights and moments."""
    (path,) = list_checkpoints(directory)
    found = {}
    for key, stored in read_metadata(path).items():
        whole = torch.empty(stored.shape, dtype=stored.dtype)
        for chunk in stored.chunks:
            place = tuple(
                slice(start, start + size)
                for start, size in zip(chunk.offsets, chunk.sizes, strict=True)
            )
            values = torch.empty(chunk.sizes, dtype=stored.dtype)
            locate(chunk).copy_rows(0, values, key)
            whole[place] = values
        found[key] = whole
    return found


@pytest.mark.parametrize(
    ("first", "others"),
    [
        (replace(DELTA, tp=2, dtype="bfloat16"), [replace(DELTA, pp=2, dtype="bfloat16")]),
        (replace(DELTA, dp=4), [replace(DELTA, tp=2, pp=2), replace(DELTA, tp=2, dp=2)]),
    ],
    ids=lambda value: str(value) if isinstance(value, Case) else None,
)
def test_optimizer_state_is_bit_identical_in_other_layouts(
    world: World, first: Case, others: list[Case], tmp_path: Path
) -> None:
    world.run(save_after_a_step, first.world_size, first, tmp_path / "0")
    expected = tensors_of(tmp_path / "0")
    moments = {key for key in expected if key.startswith("optimizer.state.exp_avg")}
    assert {key.removeprefix("optimizer.state.exp_avg.") for key in moments} >= {
        f"decoder.layers.6.self_attention.{name}"
        for name in ("in_proj.weight.beta", "conv1d.weight.key", "A_log", "out_norm.weight")
    }
    assert all(expected[key].any() for key in moments)
    for number, case in enumerate(others, start=1):
        out = tmp_path / str(number)
        world.run(load_and_save, case.world_size, case, tmp_path / "0", out)
        found = tensors_of(out)
        assert found.keys() == expected.keys()
        wrong = [key for key, value in expected.items() if not torch.equal(found[key], value)]
        assert wrong == []


def share_bytes(case: Case) -> int:
    """What this rank writes."""
    trainer = build(case).trainer
    share = own_share(describe_models(trainer.models), trainer.optimizer, is_loading=False)
    assert all(value.data.is_contiguous() for value in share)
    return sum(value.data.numel() * value.data.element_size() for value in share)


@pytest.mark.parametrize(
    "case", [Case(tp=2, dp=2, dtype="bfloat16"), Case(pp=2, dp=2), Case(cp=2, dp=2)], ids=str
)
def test_each_data_parallel_rank_writes_its_own_share_alone(world: World, case: Case) -> None:
    """Gathered state was that of the whole TP x PP shard on every data-parallel rank."""
    (whole,) = world.run(share_bytes, 1, replace(case, tp=1, pp=1, dp=1, cp=1))
    found = world.run(share_bytes, case.world_size, case)
    assert max(found) <= 1.2 * sum(found) / case.world_size
    # Norms are on every tensor-parallel rank, one of which writes them.
    assert whole <= sum(found) <= 1.05 * whole


def load_with_damage(case: Case, path: Path) -> list[tuple[str, str]]:
    """After each way to damage each file of a checkpoint: the file and the error. Then a load of
    what is whole again.
    """
    built = build(case)
    saver, is_main = checkpointer(built, path.parent), built.layout.is_main
    found = []
    files = [file for file in sorted(path.rglob("*")) if file.is_file() and file.name != COMPLETE]
    for file, how in product(files, ("flip", "cut", "delete")):
        content = file.read_bytes()
        middle = len(content) // 2
        rest = bytes([content[middle] ^ 1]) + content[middle + 1 :] if how == "flip" else b""
        dist.barrier()
        if is_main and how == "delete":
            file.unlink()
        elif is_main:
            file.write_bytes(content[:middle] + rest)
        dist.barrier()
        with pytest.raises(UserError) as caught:
            saver.load_newest()
        found.append((str(file), str(caught.value)))
        dist.barrier()
        if is_main:
            file.write_bytes(content)
        dist.barrier()
    assert saver.load_newest()["step"] == 1  # type: ignore[index]
    return found


def test_damaged_checkpoint_file_is_named(world: World, tmp_path: Path) -> None:
    case = Case(dp=2)
    world.run(save_after_a_step, 2, case, tmp_path)
    (path,) = list_checkpoints(tmp_path)
    for found in world.run(load_with_damage, 2, case, path):
        assert len(found) >= 3 * 3
        assert all(file in message and "\n" not in message for file, message in found)


COPIES = ["step_000050_keep", "step_000050_1", "step_best", "step_0000060", "step_70"]


def save_many(case: Case, directory: Path) -> tuple[list[list[Path]], Any]:
    """What can be seen after each of: a save that began, another one, the end of both, and three
    more; and what is loaded then.
    """
    saver, seen = checkpointer(build(case), directory), []
    steps = [partial(saver.start, 1, {}), partial(saver.start, 2, {}), saver.finish]
    for act in (*steps, *(partial(saver.save, step, {}) for step in (3, 10, 10))):
        act()
        seen.append(list_checkpoints(directory))
    return seen, saver.load_newest()


def test_a_save_waits_for_the_one_before_and_only_the_newest_are_kept(
    world: World, tmp_path: Path
) -> None:
    """A directory that a user put beside them is neither loaded nor deleted."""
    for name in (*COPIES, ".partial_000002"):  # of a killed run
        (tmp_path / name).mkdir()
        (tmp_path / name / COMPLETE).write_text("{}")
    seen, newest = world.run(save_many, 2, Case(dp=2), tmp_path)[0]
    one, two, three, ten = (tmp_path / f"step_{step:06d}" for step in (1, 2, 3, 10))
    assert seen == [[], [one], [one, two], [two, three], [three, ten], [three, ten]]
    assert newest["step"] == 10
    assert {path.name for path in tmp_path.iterdir()} == {*COPIES, three.name, ten.name}


def load_newest(case: Case, directory: Path) -> int | str:
    """The step of the checkpoint that was loaded, or the error."""
    try:
        manifest = checkpointer(build(case), directory).load_newest()
    except UserError as error:
        return str(error)
    return manifest["step"] if manifest else 0


def test_the_newest_whole_checkpoint_is_loaded(world: World, tmp_path: Path) -> None:
    case = Case(dp=2)
    assert world.run(load_newest, 2, case, tmp_path) == [0, 0]
    world.run(save_many, 2, case, tmp_path)
    damaged = sorted((tmp_path / "step_000010").glob("*.distcp"))[0]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert world.run(load_newest, 2, case, tmp_path) == [3, 3]
    (tmp_path / "step_000003" / COMPLETE).write_text("{")
    for message in world.run(load_newest, 2, case, tmp_path):
        assert "no checkpoint in" in message and f"step_000003/{COMPLETE} is damaged" in message
    assert {path.name for path in tmp_path.iterdir()} == {"damaged_step_000010", "step_000003"}


def test_replaced_reference_is_bit_identical_in_another_layout(
    world: World, tmp_path: Path
) -> None:
    case = Case(model="qwen2_tied", tp=2, dp=2, dtype="bfloat16")
    saved = world.run(weights_and_reference, 4, case, tmp_path, True)[0]
    assert not same(*saved)
    other = replace(case, tp=1, dp=1, pp=2)
    loaded = world.run(weights_and_reference, 2, other, tmp_path, False)[0]
    assert all(map(same, saved, loaded))
