"""A draft model in vLLM that sleeps: it wakes with the draft's own weights, or the run stops."""

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_jobs import with_session

import megatron_opsft
from megatron_opsft.errors import SyncError
from megatron_opsft.run.recorder import RunRecorder
from megatron_opsft.session import Session
from megatron_opsft.train import run_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TINY_REASONER = Path(megatron_opsft.__file__).parent / "assets/tiny_reasoner"


def sleep_with_and_without(session: Session, recorder: RunRecorder) -> list[str]:
    """What three pushes after a sleep say: two with the draft kept, one with it dropped."""
    said = []
    for step in (1, 2):
        run_step(session, recorder, step)
        said.append("")
    engine: Any = session.sampler.engine
    (wrapper,) = engine._llm.collective_rpc(lambda worker: worker)
    wrapper.worker.model_config.sleep_preserve_parameter_names = []
    engine.sleep()
    try:
        session.sync.push(3, session.probes(3))
        said.append("")
    except SyncError as error:
        said.append(str(error))
    return said


def test_a_draft_model_wakes_as_it_was_and_a_lost_one_is_seen(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    speculative = {"method": "draft_model", "model": str(TINY_REASONER)}
    speculative["num_speculative_tokens"] = 3
    overrides = ["run.device=cuda", "model.dtype=bfloat16", f"rollout.speculative={speculative}"]
    kept, again, lost = with_session(tmp_path, overrides, sleep_with_and_without)
    assert kept == again == ""
    assert "the draft model of rollout.speculative is not as it was loaded" in lost
