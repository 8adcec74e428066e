"""What vLLM is given for models with gated delta nets, and what is refused before it starts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_settings import settings_in
from tiny_models import QWEN2, QWEN3_5, SHAPES

from megatron_opsft.errors import UserError
from megatron_opsft.models.architectures.shape import DeltaShape
from megatron_opsft.models.weights.rules import WeightTable
from megatron_opsft.models.weights.vllm_layout import vllm_parameters
from megatron_opsft.rollout.engine import JOB_ID_VARIABLE
from megatron_opsft.rollout.vllm.options import check_cpu_kernels, llm_options, start_llm

SETTINGS = settings_in(Path("m"), is_cuda=False, tp=1)
DELTA = DeltaShape(
    num_key_heads=2, num_value_heads=4, key_head_dim=64, value_head_dim=64, conv_size=4
)
ACCEPTED = replace(QWEN3_5, head_dim=32, delta=DELTA)


@pytest.mark.parametrize("is_cuda", [True, False])
@pytest.mark.parametrize("name", ["Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"])
def test_the_language_model_alone_keeps_float32_states_and_no_cache_of_prompts(
    name: str, is_cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(JOB_ID_VARIABLE, raising=False)
    settings = replace(SETTINGS, is_cuda=is_cuda)
    table = WeightTable(replace(ACCEPTED, architecture=name))
    options = llm_options(settings, table)
    assert options["hf_overrides"] == {"architectures": ["Qwen3_5ForCausalLM"]}
    assert options["mamba_ssm_cache_dtype"] == "float32"
    assert options["enable_prefix_caching"] is False
    assert options.get("gdn_prefill_backend") == ("triton" if is_cuda else None)
    # vLLM notes experts only with that cache.
    noted = llm_options(replace(settings, notes_routing=True), table)
    assert noted["enable_prefix_caching"] is True
    plain = llm_options(settings, WeightTable(QWEN2))
    assert plain["enable_prefix_caching"] is True
    assert not {"hf_overrides", "mamba_ssm_cache_dtype", "gdn_prefill_backend"} & plain.keys()


def test_the_cache_on_a_cpu_has_room_for_a_full_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """And for one sequence more. A token of an attention layer takes 2 x 2 x 32 numbers of 2 bytes;
    a state 4 x 64 x 64 numbers of 4 bytes, and of 3 tokens 512 of 2: as much as 268 tokens. So
    vLLM's blocks have 288 tokens (it says so itself), and 300 tokens take two.
    """
    monkeypatch.delenv(JOB_ID_VARIABLE, raising=False)
    settings = replace(SETTINGS, batch_size=127)
    options = llm_options(settings, WeightTable(ACCEPTED))
    assert options["kv_cache_memory_bytes"] == 128 * (2 * 2 + 6) * 288 * 256
    shape = replace(QWEN2, hidden_size=128, head_dim=32)
    plain = llm_options(settings, WeightTable(shape))
    assert plain["kv_cache_memory_bytes"] == 128 * 4 * 320 * 256


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"head_dim": 16}, r"head_dim=16, only \(32, 64,"),
        ({"key_head_dim": 128}, "linear_key_head_dim=128 other than linear_value_head_dim=64"),
        ({"key_head_dim": 32, "value_head_dim": 32}, r"linear_key_head_dim=32, only \(64, 128\)"),
        ({"conv_size": 3}, "linear_conv_kernel_dim=3, only 4"),
    ],
)
def test_sizes_that_kernels_for_cpus_lack_are_refused(changes: dict[str, Any], said: str) -> None:
    check_cpu_kernels(ACCEPTED, "bfloat16")
    head_dim = changes.pop("head_dim", 32)
    shape = replace(ACCEPTED, head_dim=head_dim, delta=replace(DELTA, **changes))
    with pytest.raises(UserError, match=said):
        check_cpu_kernels(shape, "bfloat16")


def test_float32_and_drafts_are_refused_before_vllm_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megatron_opsft.rollout.vllm.options.check_installed", lambda name: None)
    table = WeightTable(ACCEPTED)
    with pytest.raises(UserError, match=r"in bfloat16, not in float32; set model\.dtype=bfloat16"):
        start_llm(replace(SETTINGS, dtype="float32"), table)
    drafts = replace(SETTINGS, speculative={"method": "ngram"})
    with pytest.raises(UserError, match=r"set rollout\.speculative=null"):
        start_llm(drafts, table)
    check_cpu_kernels(QWEN2, "float32")


@pytest.mark.parametrize("tp", [1, 2])
def test_only_log_decays_are_float32_in_every_model(tp: int) -> None:
    for name, shape in SHAPES.items():
        parameters = vllm_parameters(WeightTable(shape), 0, tp)
        found = {parameter.name for parameter in parameters if parameter.is_float32}
        decays = {
            f"model.layers.{layer}.linear_attn.A_log"
            for layer in range(shape.num_layers)
            if shape.kind_of(layer) == "linear_attention"
        }
        assert found == decays, name


def test_a_tp_that_cuts_heads_of_gated_delta_nets_is_refused() -> None:
    shape = replace(ACCEPTED, num_heads=8, delta=replace(DELTA, num_key_heads=2))
    with pytest.raises(UserError, match=r"rollout\.tp=4 does not divide linear_num_key_heads=2"):
        vllm_parameters(WeightTable(shape), 0, 4)
