"""What vLLM finds in its environment, without vLLM."""

import os

import pytest

from megatron_opsft.errors import UserError
from megatron_opsft.rollout.vllm.options import prepare_environment

SAMPLER = "VLLM_USE_FLASHINFER_SAMPLER"


def sampler_of(
    monkeypatch: pytest.MonkeyPatch, is_cuda: bool, given: str | None, seeded: bool = True
) -> str | None:
    """The variable's value when vLLM starts."""
    environment = {} if given is None else {SAMPLER: given}
    monkeypatch.setattr(os, "environ", environment)
    prepare_environment(is_cuda, rank=0, seeded=seeded)
    return environment.get(SAMPLER)


def test_on_a_gpu_the_sampler_that_is_compiled_and_never_used_is_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert sampler_of(monkeypatch, is_cuda=True, given=None) == "0"
    assert sampler_of(monkeypatch, is_cuda=True, given="1") == "1"
    assert sampler_of(monkeypatch, is_cuda=False, given=None) is None
    assert sampler_of(monkeypatch, is_cuda=True, given="0", seeded=False) == "0"
    monkeypatch.setattr("shutil.which", lambda name: name)
    assert sampler_of(monkeypatch, is_cuda=True, given=None, seeded=False) is None
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("os.path.isfile", lambda name: False)
    with pytest.raises(UserError, match="rollout.seeded=false: .* there is no nvcc; set CUDA_HOME"):
        sampler_of(monkeypatch, is_cuda=True, given=None, seeded=False)
