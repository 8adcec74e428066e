"""What is said of a draft model that cannot be used, before any engine is started."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_models import SHAPES

from megatron_opsft.config_file import load_config
from megatron_opsft.config_identity import config_hash
from megatron_opsft.errors import UserError
from megatron_opsft.rollout.draft_files import check_draft
from megatron_opsft.rollout.limits import check_engine, engines_steal

SHAPE = replace(SHAPES["llama3"], hidden_size=64, vocab_size=96, num_layers=8)
HEAD = {"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 64, "vocab_size": 96}
KEYS = ["model.path=m", "data.train=problems.jsonl", "model.dtype=float32"]


def written(directory: Path, **changed: Any) -> Path:
    (directory / "config.json").write_text(json.dumps(HEAD | changed))
    return directory


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        ("LlamaForCausalLMEagle3", "eagle3"),
        ("Eagle3LlamaForCausalLM", "eagle3"),
        ("Eagle3Qwen3ForCausalLM", "eagle3"),
        ("EagleLlamaForCausalLM", "eagle"),
    ],
)
def test_the_kind_is_what_the_config_says(tmp_path: Path, architecture: str, kind: str) -> None:
    assert check_draft(written(tmp_path, architectures=[architecture]), SHAPE) == kind


def test_a_head_of_another_width_says_for_which_model_it_is(tmp_path: Path) -> None:
    head = written(tmp_path, hidden_size=32, target_hidden_size=64)
    assert check_draft(head, SHAPE) == "eagle3"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM is no EAGLE draft model"),
        ({"architectures": None}, "architecture none is no EAGLE draft model"),
        ({"architectures": ["PEagleDraftModel"]}, "is no EAGLE draft model"),
        ({"architectures": ["EagleDeepSeekMTPModel"]}, "multi-token prediction"),
        (
            {"architectures": ["Qwen3ForCausalLM"], "num_nextn_predict_layers": 1},
            "none of the architectures that can be trained here has; give an EAGLE-3 head",
        ),
        ({"hidden_size": 128}, "hidden size 128, and this one's is 64"),
        ({"vocab_size": 100}, "vocabulary 100, and this one's is 96"),
        (
            {"eagle_aux_hidden_state_layer_ids": [1, 9, 10]},
            r"layers \[1, 9, 10\] of a model with 8",
        ),
    ],
)
def test_what_is_no_draft_of_the_model_is_refused(
    tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said) as caught:
        check_draft(written(tmp_path, **changed), SHAPE)
    assert str(caught.value).startswith(f"rollout.draft_model={tmp_path}: ")
    assert "\n" not in str(caught.value)


def test_layers_that_vllm_would_choose_twice_are_refused(tmp_path: Path) -> None:
    shallow = replace(SHAPE, num_layers=4)
    with pytest.raises(UserError, match=r"layers \[2, 2, 1\] of a model with 4"):
        check_draft(written(tmp_path), shallow)
    named = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}
    assert check_draft(written(tmp_path, **named), shallow) == "eagle3"


@pytest.mark.parametrize("shape", [SHAPE, None])
def test_a_directory_that_is_no_model_is_refused(tmp_path: Path, shape: Any) -> None:
    with pytest.raises(UserError, match="it has no config.json"):
        check_draft(tmp_path, shape)
    with pytest.raises(UserError, match="there is no such directory"):
        check_draft(tmp_path / "missing", shape)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="is no JSON"):
        check_draft(tmp_path, shape)


def test_drafts_have_one_source() -> None:
    keys = ["rollout.engine=vllm", "rollout.speculation=suffix", "rollout.draft_model=d"]
    with pytest.raises(UserError, match="drafts have one source; leave one of them out"):
        load_config(None, [*KEYS, *keys])


def test_the_hf_engine_has_no_draft_model() -> None:
    config = load_config(None, [*KEYS, "rollout.draft_model=d"])
    with pytest.raises(UserError) as caught:
        check_engine(config)
    assert str(caught.value) == (
        "rollout.draft_model=d is vLLM's; set rollout.engine=vllm or rollout.draft_model=null"
    )


def test_who_answers_is_seen_in_the_responses_as_with_speculation() -> None:
    keys = [*KEYS, "rollout.engine=vllm"]
    assert engines_steal(load_config(None, keys), 2, is_cuda=True)
    drafted = load_config(None, [*keys, "rollout.draft_model=d"])
    assert not engines_steal(drafted, 2, is_cuda=True)


def test_a_draft_model_makes_another_run_and_its_absence_does_not() -> None:
    plain = load_config(None, KEYS)
    drafted = load_config(None, [*KEYS, "rollout.draft_model=d"])
    longer = load_config(None, [*KEYS, "rollout.draft_model=d", "rollout.draft_tokens=5"])
    assert len({config_hash(config) for config in (plain, drafted, longer)}) == 3
    tree = plain.model_dump(mode="json")["rollout"]
    assert tree["draft_model"] is None and tree["draft_tokens"] == 3
