"""Choosing an engine, what pushes are proved on, and what vLLM is given; without vLLM."""

import importlib.util
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from engine_settings import settings_in
from plan_cases import REAL_SHAPES
from responses import facts

from megatron_opsft.config import Config
from megatron_opsft.config.load import load_config, to_yaml
from megatron_opsft.errors import UserError
from megatron_opsft.models.architectures.config_from_hf import read_model_shape
from megatron_opsft.models.storage.model_paths import resolve_model
from megatron_opsft.models.weights.rules import WeightTable
from megatron_opsft.records import NO_RANK, Sample
from megatron_opsft.rollout import limits
from megatron_opsft.rollout.limits import check_installed
from megatron_opsft.rollout.vllm.options import (
    JOB_ID_VARIABLE,
    llm_options,
    prepare_vllm_environment,
)
from megatron_opsft.rollout.vllm.weights import DraftWeights
from megatron_opsft.run.start import session
from megatron_opsft.run.start.checked_run import make_checked_run
from megatron_opsft.run.start.session import MAX_PROBE_TOKENS, Session


def config(*overrides: str) -> Config:
    return load_config(None, ["model.path=tiny_reasoner", "data.train=arithmetic", *overrides])


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("rollout.engine=vllm", "vLLM is not installed; .* bash tools/install_vllm_cpu.sh"),
        ("rollout.tp=2", "rollout.tp=2 works only with vLLM"),
        ("rollout.speculative={method: ngram}", r"speculative={'method': 'ngram'} works only .*"),
        ("rollout.seeded=false", "rollout.seeded=false works only .* or rollout.seeded=true"),
        ("model.load=engine", r"model\.load=engine: .* or model\.load=disk"),
        ("rollout.engine=sglang", "rollout.engine=sglang: .* use one of hf, vllm"),
    ],
)
def test_what_an_engine_cannot_do_is_refused(
    monkeypatch: pytest.MonkeyPatch, key: str, said: str
) -> None:
    monkeypatch.setattr(limits, "is_installed", lambda *packages: False)
    run = config(key, "rollout.max_response_tokens=64")
    with pytest.raises(UserError, match=said):
        make_checked_run(run, read_model_shape(resolve_model("tiny_reasoner")), 2)
        check_installed(run.rollout.engine)


def test_a_folder_called_vllm_is_no_installation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Such as a clone of its repository, or tests/vllm where `tests` is on the path."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").touch()
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert importlib.util.find_spec("vllm")
    with pytest.raises(UserError, match=r"eval\.engine=vllm: vLLM is not installed"):
        limits.check_installed("vllm", section="eval.")


def test_probes_are_few_short_and_of_different_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "gather_from_all", lambda mine: mine)
    prompts = [SimpleNamespace(id="q", ids=ids) for ids in ((5,), (5, 6, 7))]
    s: Any = SimpleNamespace(
        config=config("data.max_prompt_tokens=10", "rollout.max_response_tokens=300"),
        layout=SimpleNamespace(rank=0),
        encoder=SimpleNamespace(encode=lambda problem: problem.ids),
        problems_of_draw=lambda draw: prompts,
    )
    kept = [Sample(problem_id="p", prompt_ids=(1,) * 9, response_ids=(n,) * 400) for n in range(20)]
    kept[3] = replace(kept[3], prompt_ids=(1,) * 300)  # leaves room for 9 tokens and one more
    accepted = [facts(problem_index=n // 2, rollout_index=n) for n in range(20)]
    found = [p.response_ids for p in Session.probes(s, 7, accepted, kept)]  # type: ignore[arg-type]
    assert [ids[0] for ids in found] == [1, 3, 5, 7]
    assert [len(ids) for ids in found] == [MAX_PROBE_TOKENS, 9, MAX_PROBE_TOKENS, MAX_PROBE_TOKENS]
    # Where nothing is sampled, prompts are read as responses.
    (prompt,) = Session.probes(s, 1, [facts(rank=NO_RANK)])
    assert (prompt.prompt_ids, prompt.response_ids) == ((5,), (6, 7))


def test_a_speculative_mapping_on_the_command_line_and_in_a_file(tmp_path: Path) -> None:
    given = "{method: ngram, num_speculative_tokens: 4, prompt_lookup_max: 3}"
    made = config("run.dir=/tmp/run", "rollout.engine=vllm", f"rollout.speculative={given}")
    assert made.rollout.speculative == yaml.safe_load(given)
    written = tmp_path / "config.yaml"
    written.write_text(to_yaml(made))
    assert load_config(written) == made


def test_a_draft_s_embedding_that_pushes_no_longer_reach_is_a_fault() -> None:
    policy = torch.nn.ModuleDict({"embed": torch.nn.Embedding(7, 4), "up": torch.nn.Linear(4, 8)})
    draft = torch.nn.ModuleDict({"embed": policy["embed"], "up": torch.nn.Linear(4, 8)})
    draft.register_buffer("table", torch.arange(5.0))
    weights = DraftWeights(draft, policy)
    for parameter in policy.parameters():  # as a push does
        parameter.data.add_(1.0)
    assert weights.fault() == ""
    draft["embed"] = torch.nn.Embedding.from_pretrained(policy["embed"].weight.clone())
    assert "no longer shares embed.weight with the policy" in weights.fault()


def test_on_a_gpu_the_sampler_that_is_compiled_is_off_where_seeds_leave_it_unused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "VLLM_USE_FLASHINFER_SAMPLER"
    monkeypatch.setattr("shutil.which", lambda name: name)
    for is_cuda, given, seeded, found in (
        *((True, None, True, "0"), (True, "1", True, "1"), (False, None, True, None)),
        *((True, "0", False, "0"), (True, None, False, None)),
    ):
        monkeypatch.setattr(os, "environ", {name: given} if given else {})
        prepare_vllm_environment(is_cuda, rank=0, seeded=seeded)
        assert os.environ.get(name) == found
        assert os.environ.get("VLLM_ALLREDUCE_USE_FLASHINFER") == ("0" if is_cuda else None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("os.path.isfile", lambda name: False)
    with pytest.raises(UserError, match="there is no nvcc; set CUDA_HOME"):
        prepare_vllm_environment(True, rank=0, seeded=False)


def test_vllm_s_cache_on_a_cpu_has_room_for_a_full_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """And for one sequence more, in blocks of 32 tokens."""
    monkeypatch.delenv(JOB_ID_VARIABLE, raising=False)
    settings = settings_in(Path("m"), is_cuda=False)
    plain = llm_options(settings, WeightTable(REAL_SHAPES["Qwen3-8B"]))
    assert plain["kv_cache_memory_bytes"] == 8 * 320 * 147_456


@pytest.mark.parametrize("is_cuda", [True, False])
def test_what_vllm_is_given_follows_the_settings(
    is_cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(JOB_ID_VARIABLE, raising=False)
    directory = resolve_model("tiny_reasoner")
    settings = settings_in(directory, is_cuda=is_cuda, kv_cache_bytes=12345)
    options = llm_options(settings, WeightTable(read_model_shape(directory), "te"))
    given = {"tensor_parallel_size": 2, "max_model_len": 300, "max_num_seqs": 7, "seed": 3}
    # Whole seconds, rounded up: as long as the trainer's own collectives wait, and no longer.
    given |= {"distributed_timeout_seconds": 451, "cpu_distributed_timeout_seconds": 451}
    given |= {"kv_cache_memory_bytes": 12345, "model": str(directory), "dtype": "bfloat16"}
    if is_cuda:
        given |= {"gpu_memory_utilization": 0.4, "enable_sleep_mode": True}
        given |= {"sleep_mode_offload_cudagraph": True, "enable_nccl_comm_suspend": True}
    assert given.items() <= options.items()
    assert ("worker_cls" in options) == (not is_cuda)
