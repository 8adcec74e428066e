"""vLLM with `rollout.speculative`: responses, counters, pushes, and what is refused."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import skip_without_vllm
from vllm_jobs import QUICKSTART, SMALL, KeptSession, opened, train_and_compare
from world import World

import megatron_opsft
from megatron_opsft.errors import SyncError, UserError
from megatron_opsft.run.record.recorder import RunRecorder
from megatron_opsft.run.start.session import Session

pytestmark = pytest.mark.vllm
TINY_REASONER = Path(megatron_opsft.__file__).parent / "assets/tiny_reasoner"
NGRAM = "{method: ngram, num_speculative_tokens: 3, prompt_lookup_min: 1, prompt_lookup_max: 4}"
# The draft is the policy as it was before the run.
DRAFT = f"{{method: draft_model, model: {TINY_REASONER}, num_speculative_tokens: 3}}"


@pytest.fixture(scope="module")
def session(vllm_world: World, tmp_path_factory: pytest.TempPathFactory) -> KeptSession:
    """Of two ranks that share an engine."""
    overrides = [f"rollout.speculative={DRAFT}", "rollout.tp=2", "optimizer.lr=5e-4"]
    return KeptSession(vllm_world, tmp_path_factory.mktemp("session"), 2, overrides)


def check_run(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics of two steps, which have the counters; the responses of the last are complete."""
    packed = (run_dir / "rollouts/step_000002.jsonl.gz").read_bytes()
    rollouts = [json.loads(line) for line in gzip.decompress(packed).splitlines()]
    stopped = [rollout["finish_reason"] == "stop" for rollout in rollouts]
    assert len(stopped) == 16 and any(stopped)
    assert all(s or r["num_tokens"] == 64 for s, r in zip(stopped, rollouts, strict=True))
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    for line in lines:
        assert line["logprob_diff_max"] < 1e-4
        assert 0 < line["spec_acceptance"] <= 1
        assert line["spec_acceptance"] <= line["spec_tokens_per_draft"] <= 3
    return lines


def test_responses_are_complete_and_log_probs_those_of_the_pushed_policy(
    session: KeptSession,
) -> None:
    for differences, not_pulled in session.run(train_and_compare, 2):
        assert max(differences) < 1e-4 and not_pulled == 0
    # The draft is the policy at first, and takes its most probable tokens; a random one would have
    # one in a hundred right.
    assert check_run(session.run_dir)[0]["spec_acceptance"] > 0.5


def test_ngram_in_a_run(tmp_path: Path) -> None:
    """In a process of its own: vLLM starts only once in one that has imported numba."""
    skip_without_vllm()
    keys = [*SMALL, f"run.dir={tmp_path / 'run'}", "run.steps=2", f"rollout.speculative={NGRAM}"]
    command = [sys.executable, "-m", "megatron_opsft", "train", str(QUICKSTART), *keys]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-2000:]
    check_run(tmp_path / "run")


def said_with_another_draft(session: Session, recorder: RunRecorder) -> str:
    """Of a push with one weight of the draft another by one bit; one afterwards is well."""
    engine: Any = session.sampler.engine
    (wrapper,) = engine._llm.collective_rpc(lambda worker: worker)
    draft = wrapper.worker.get_draft_model()
    with torch.inference_mode():
        weight = draft.model.layers[0].post_attention_layernorm.weight.data
        kept = weight[3].clone()
        weight[3] = torch.nextafter(kept, kept + 1)
        with pytest.raises(SyncError) as caught:
            session.sync.push(session.sync.version)
        weight[3] = kept
        session.sync.push(session.sync.version)
    return str(caught.value)


def test_a_draft_that_has_changed_by_one_bit_stops_the_run(session: KeptSession) -> None:
    """What a sleep leaves of one: tests/gpu/test_push.py."""
    for said in session.run(said_with_another_draft):
        assert "the draft model of rollout.speculative is not as it was loaded" in said
        assert "post_attention_layernorm.weight has changed" in said and "\n" not in said


def refusal(run_dir: Path, speculative: str) -> str:
    keys = [f"rollout.speculative={speculative}"]
    with pytest.raises(UserError) as caught, opened(run_dir, keys):
        pass
    return str(caught.value)


@pytest.mark.parametrize(
    ("speculative", "named"),
    [
        ("{method: nonsense, num_speculative_tokens: 3}", "method Input should be 'ngram', "),
        ("{method: ngram}", "num_speculative_tokens must be provided"),
        (
            "{method: draft_model, model: /nowhere, num_speculative_tokens: 1}",
            "Invalid repository ID or local directory specified: '/nowhere'",
        ),
    ],
)
def test_what_vllm_refuses_is_one_line(
    vllm_world: World, tmp_path: Path, speculative: str, named: str
) -> None:
    (said,) = vllm_world.run(refusal, 1, tmp_path / "run", speculative)
    assert "vLLM refuses this model with rollout.speculative={'method': " in said
    assert named in said and "\n" not in said and "errors.pydantic.dev" not in said
