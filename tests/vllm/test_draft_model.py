"""vLLM with a draft model: it decodes, and after every push the draft is what its files hold."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_heads import write_head
from safetensors.torch import load_file
from vllm_jobs import KeptSession
from world import World

import megatron_opsft
from megatron_opsft.errors import SyncError
from megatron_opsft.rollout.engine import Checksums
from megatron_opsft.run.recorder import RunRecorder
from megatron_opsft.session import Session
from megatron_opsft.sync.checksums import differing_parameters
from megatron_opsft.train import run_step

pytestmark = pytest.mark.vllm
TINY_REASONER = Path(megatron_opsft.__file__).parent / "assets/tiny_reasoner"
TP2 = ["rollout.tp=2", "data.prompts_per_step=2", "rollout.group_size=4"]
# Ranks, overrides, whether weights are plain, and the head: what it shares with the model.
LAYOUTS: dict[str, tuple[int, list[str], bool, dict[str, Any]]] = {
    "packed, own head": (1, [], False, {"kept": range(10, 110)}),
    "plain, own embedding": (1, [], True, {"own_embedding": True}),
    "packed, EAGLE": (1, [], False, {"older": True}),
    "plain, TP2": (2, TP2, True, {"kept": range(10, 110)}),
}


@pytest.fixture(scope="module")
def session(
    vllm_world: World, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> KeptSession:
    ranks, overrides, plain, made = LAYOUTS[request.param]
    directory = tmp_path_factory.mktemp("session")
    head = write_head(directory / "head", TINY_REASONER, **made)
    keys = [*overrides, "optimizer.lr=5e-4", f"rollout.draft_model={head}"]
    return KeptSession(vllm_world, directory / "run", ranks, keys, plain)


def in_layouts(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("session", names, indirect=True)


def worker_of(session: Session) -> Any:
    engine: Any = session.sampler.engine
    (wrapper,) = engine._core.llm.collective_rpc(lambda worker: worker)
    return wrapper.worker


def two_steps(session: Session, recorder: RunRecorder) -> tuple[list[dict[str, Any]], set[str]]:
    """Their metrics; the draft's modules that are the model's own."""
    for _ in range(2):
        run_step(session, recorder, session.sync.version + 1)
    worker = worker_of(session)
    own = {id(module) for module in worker.get_model().modules()}
    modules = worker.get_draft_model().named_modules()
    file = session.config.run.dir / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return lines, {name for name, module in modules if id(module) in own}


@in_layouts(*LAYOUTS)
def test_a_step_decodes_with_drafts_until_they_end_and_every_push_is_proved(
    session: KeptSession, request: pytest.FixtureRequest
) -> None:
    lines, shared = session.run(two_steps)[0]
    with_drafts, without = lines
    # As many as were asked for, but for the last ones of a response.
    assert 2 < with_drafts["draft_length"] <= 3
    assert 0 <= with_drafts["draft_acceptance"] < 1
    drafted = with_drafts["draft_length"] * with_drafts["draft_acceptance"]
    assert math.isclose(with_drafts["draft_pass_tokens"], 1 + drafted, rel_tol=1e-9)
    # They are a random head's.
    assert (without["draft_length"], without["draft_pass_tokens"]) == (0, 1)
    for line in lines:
        assert "draft_saved_seconds" not in line
        assert line["logprob_diff_max"] < 1e-4
    made = LAYOUTS[request.node.callspec.params["session"]][3]
    assert ("model.embed_tokens" in shared) == ("own_embedding" not in made)
    assert ("lm_head" in shared) == ("kept" not in made)


def why_not_loaded(session: Session, recorder: RunRecorder) -> dict[str, str]:
    """Of the draft against its files, and against files with one other tensor."""
    file = session.config.rollout.draft_model
    assert file is not None
    tensors = load_file(file / "model.safetensors")
    proof = worker_of(session)._opsft_draft
    found = {"": proof.why_not_loaded(tensors.items(), torch.float32)}
    assert proof.why_not_shared() == ""
    for name, tensor in tensors.items():
        other = tensors | {name: tensor.roll(1) + 1 if tensor.dtype != torch.bool else ~tensor}
        found[name] = proof.why_not_loaded(other.items(), torch.float32)
    return found


@in_layouts("packed, own head", "plain, own embedding")
def test_what_vllm_loaded_is_what_the_files_hold(session: KeptSession) -> None:
    (found,) = session.run(why_not_loaded)
    assert len(found) > 10
    same = {name for name, why in found.items() if not why}
    assert same == {"", "t2d"} & found.keys()  # vLLM has no use for the one tensor


Spoilt = Callable[[Any], AbstractContextManager[None]]


@contextmanager
def one_weight(worker: Any) -> Iterator[None]:
    weight = worker.get_draft_model().model.layers[0].post_attention_layernorm.weight.data
    kept = weight[3].clone()
    weight[3] = torch.nextafter(kept, kept + 1)
    yield
    weight[3] = kept


@contextmanager
def swapped_weights(worker: Any) -> Iterator[None]:
    weight = worker.get_draft_model().model.layers[0].post_attention_layernorm.weight.data
    weight[:2] = weight[:2].flip(0)
    yield
    weight[:2] = weight[:2].flip(0)


@contextmanager
def all_weights(worker: Any) -> Iterator[None]:
    """What a sleep leaves that keeps no draft; vLLM's way to keep it brings all of it back."""
    drafts = {
        name: parameter
        for name, parameter in worker._get_sleep_parameters(worker.get_model()).items()
        if name.startswith("draft.")
    }
    worker._sleep_saved_parameters = {n: p.detach().clone() for n, p in drafts.items()}
    for parameter in drafts.values():
        parameter.data.zero_()
    yield
    worker._restore_sleep_parameters(worker.get_model())
    worker._sleep_saved_parameters = {}


@contextmanager
def rotations(worker: Any) -> Iterator[None]:
    draft = worker.get_draft_model()
    (table,) = {b for n, b in draft.named_buffers() if n.endswith("cos_sin_cache")}
    kept = table.clone()
    table.zero_()
    yield
    table.copy_(kept)


@contextmanager
def another_embedding(worker: Any) -> Iterator[None]:
    """The same values, and no longer the module that a push writes."""
    draft = worker.get_draft_model().model
    shared = draft.embed_tokens
    del draft.embed_tokens
    other = type(shared).__new__(type(shared))
    other.__dict__.update(shared.__dict__)
    draft.embed_tokens = other
    yield
    draft.embed_tokens = shared


def said_of(session: Session, recorder: RunRecorder, spoilt: Spoilt) -> list[str]:
    """Of a push with the draft spoilt, and of one afterwards."""
    said = []

    def push() -> None:
        try:
            session.sync.push(session.sync.version)
            said.append("")
        except SyncError as error:
            said.append(str(error))

    with torch.inference_mode(), spoilt(worker_of(session)):
        push()
    push()
    return said


@pytest.mark.parametrize(
    ("spoilt", "named"),
    [
        (one_weight, "post_attention_layernorm.weight"),
        (swapped_weights, "post_attention_layernorm.weight"),
        (rotations, "cos_sin_cache"),
    ],
)
@in_layouts(*LAYOUTS)
def test_a_spoilt_draft_stops_the_run(session: KeptSession, spoilt: Spoilt, named: str) -> None:
    for spoiled, afterwards in session.run(said_of, spoilt):
        assert "the draft model" in spoiled and named in spoiled
        assert "\n" not in spoiled
        assert afterwards == ""


@in_layouts("plain, own embedding", "plain, TP2")
def test_a_draft_that_sleep_has_lost_stops_the_run(session: KeptSession) -> None:
    for spoiled, afterwards in session.run(said_of, all_weights):
        assert "is not what was loaded from its files" in spoiled
        assert afterwards == ""


def said_without(session: Session, recorder: RunRecorder, part: str) -> str:
    """As if the files had lacked a part that vLLM then left at random."""
    worker = worker_of(session)
    draft = worker.get_draft_model()
    setattr(draft, f"has_own_{part}", False)
    try:
        return str(worker._opsft_draft.why_not_shared())
    finally:
        setattr(draft, f"has_own_{part}", True)


@in_layouts("packed, own head")
def test_a_part_that_nobody_has_given_is_seen(session: KeptSession) -> None:
    (said,) = session.run(said_without, "lm_head")
    assert said == "its files hold no lm_head, and vLLM did not give it the model's"


@in_layouts("packed, own head")
def test_an_embedding_that_no_push_reaches_stops_the_run(session: KeptSession) -> None:
    ((spoiled, afterwards),) = session.run(said_of, another_embedding)
    assert "model.embed_tokens is not the model's own any more" in spoiled
    assert afterwards == ""


class FaultyEngine:
    """As far as a proof asks one whose draft is spoilt."""

    def __init__(self, engine: Any) -> None:
        self._engine, self.layout = engine, engine.layout

    def checksums(self, cuts: int) -> Checksums:
        return replace(self._engine.checksums(cuts), draft_fault="its fc is another")


def said_of_a_faulty_engine(session: Session, recorder: RunRecorder) -> str:
    try:
        differing_parameters(session.shards, FaultyEngine(session.sampler.engine), ())  # type: ignore[arg-type]
    except SyncError as error:
        return str(error)
    return ""


@in_layouts("plain, TP2")
def test_one_rank_s_fault_stops_all_ranks(session: KeptSession) -> None:
    assert (
        session.run(said_of_a_faulty_engine)
        == ["its fc is another; nothing was sampled with it"] * 2
    )
