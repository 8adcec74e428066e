"""What a GPU run does, on a pretended GPU: values are real, and every operation's place is checked.

The rollout engine is Hugging Face's. Layers are the plain ones where it does not say
TransformerEngine's. Triton kernels run in Triton's interpreter.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Ran = Callable[..., Any]

LAYOUTS = [
    ("tp2sp,pp2,dp2,cp2", "bfloat16", "qwen2"),
    ("ep2", "float32", "qwen3_moe"),  # bounds of bfloat16 are those of dense models
]
TP2 = ["parallel.tp=2", "parallel.sequence_parallel=true"]
RUNS = [  # the second on TransformerEngine's layers
    (1, ["grpo", "method.beta=0.04", "method.updates_per_batch=2", "train.recompute=full"]),
    (2, ["self_distillation", *TP2, "method.refresh_every=1", "method.responses=all"]),
]


@pytest.mark.parametrize(("layouts", "dtype", "model"), LAYOUTS)
def test_layouts_train_as_hugging_face_does(ran: Ran, layouts: str, dtype: str, model: str) -> None:
    words = ["--device", "cuda", "--layouts", layouts, "--dtypes", dtype, "--models", model]
    told = ran("-m", "proof.steps", *words, num_gpus=2)
    assert told["problems"] == []
    assert len(told["details"]["cases"]) == len(layouts.split(","))


@pytest.mark.parametrize(("num_gpus", "words"), RUNS, ids=lambda value: str(value)[:24])
def test_a_run_trains_and_resumes_to_the_last_bit(
    ran: Ran, tmp_path: Path, num_gpus: int, words: list[str]
) -> None:
    told = ran("pretended_runs.py", tmp_path, *words, num_gpus=num_gpus, te=num_gpus == 2)
    assert told["problems"] == []
    assert told["line"]["num_accepted"] > 0 and told["line"]["logprob_diff_mean"] < 0.05
    assert (tmp_path / "whole/hf/model.safetensors").is_file()


def test_weights_come_from_an_engine_and_go_back_in_place(ran: Ran, tmp_path: Path) -> None:
    told = ran("pretended_runs.py", tmp_path, "engine", num_gpus=1)
    assert told["problems"] == []
    assert told["line"]["num_accepted"] > 0


@pytest.mark.parametrize("te", [False, True])
def test_a_run_whose_trainer_sleeps_is_the_same_run(ran: Ran, tmp_path: Path, te: bool) -> None:
    """With a reference; on TransformerEngine's layers with its AdamW. While the engine samples,
    each level frees what a plan says of it: gradients, moments and main weights, weights.
    """
    words = ["offload", "method.name=grpo", "method.beta=0.04", "method.updates_per_batch=2"]
    told = ran("pretended_runs.py", tmp_path, *words, num_gpus=1, te=te)
    assert told["problems"] == []
    assert told["line"]["grad_norm"] > 0
    num_parameters, sampling = told["line"]["num_parameters"], told["line"]["sampling"]
    none, gradients, optimizer, everything = sampling.values()
    # The reference leaves the GPU with the gradients.
    freed = [none - gradients, gradients - optimizer, optimizer - everything]
    expected = [(4 + 2) * num_parameters, 12 * num_parameters, 2 * num_parameters]
    assert freed == pytest.approx(expected, rel=0.05)
    # The copy of a checkpoint and, asleep, the reference; what sleeps needs no other copy.
    pinned = [size / num_parameters for size in told["line"]["pinned"].values()]
    assert pinned == pytest.approx([14, 16, 16, 16], rel=0.05)


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_memory_of_a_step_is_as_planned(ran: Ran, num_gpus: int) -> None:
    told = ran("pretended_memory.py", num_gpus, num_gpus=num_gpus)
    assert len(told) >= 3
    for case, (measured, planned) in told.items():
        assert measured == pytest.approx(planned, rel=0.1), case


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_pinned_host_memory_is_as_planned(ran: Ran, tmp_path: Path, num_gpus: int) -> None:
    """Of a reference model, then with a checkpoint, then with a second one."""
    told = ran("pretended_pinned.py", num_gpus, tmp_path, num_gpus=num_gpus)
    assert len(told) == (3 if num_gpus == 1 else 1)
    for case, found in told.items():
        assert found["blocks"] == 2, case
        for pinned, planned in zip(found["pinned"], found["planned"], strict=True):
            assert planned <= pinned <= planned + found["bound"], case


def test_the_gpu_s_own_tests_pass(ran: Ran) -> None:
    """One of each kind: the others are the same code on other models."""
    chosen = "checkpoint or objective or full-qwen3-bfloat16 or ours_is_that"
    names = ("train_step", "checkpoint_gpu", "delta_net")
    files = [f"tests/gpu/test_{name}.py" for name in names]
    said = ran("-m", "pytest", "-m", "gpu", "-W", "ignore", "-k", chosen, *files, num_gpus=1)
    assert "8 passed" in said
