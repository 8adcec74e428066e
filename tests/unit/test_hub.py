"""A hub that cannot be reached: one line at once, and offline mode from then on."""

import logging
import os
import time
from collections.abc import Iterator

import datasets
import huggingface_hub.constants
import pytest

from megatron_opsft.data.problems import load_problems
from megatron_opsft.data.sources import has_split
from megatron_opsft.errors import UserError
from megatron_opsft.runtime.libraries import prepare_hub
from megatron_opsft.storage.model_paths import resolve_model

NOBODY = "http://127.0.0.1:9"  # where nothing listens


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that has asked for nothing yet."""
    for name in ("HF_HUB_OFFLINE", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", NOBODY)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    prepare_hub.cache_clear()
    yield
    os.environ.pop("HF_HUB_OFFLINE", None)
    prepare_hub.cache_clear()


def test_out_of_reach_is_one_line_for_data_and_models(caplog: pytest.LogCaptureFixture) -> None:
    began = time.monotonic()
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(
            UserError, match=r"nobody/nothing is neither a file here nor .*cannot be reached"
        ),
    ):
        load_problems("nobody/nothing")
    with pytest.raises(UserError, match=r"model.path=nobody/nothing .*the hub cannot be reached"):
        resolve_model("nobody/nothing")
    with pytest.raises(UserError, match=r"nor a data set in the Hugging Face cache"):
        has_split("nobody/nothing", "test", None)
    assert time.monotonic() - began < 20  # retries alone would take 23 s
    assert [record.message for record in caplog.records] == [
        "127.0.0.1 cannot be reached (Connection refused): only its local cache is used"
    ]


def test_offline_mode_is_said_and_nothing_is_tried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE=1 is set"):
        load_problems("nobody/nothing")
    with pytest.raises(UserError, match="HF_HUB_OFFLINE=1 is set"):
        resolve_model("nobody/nothing")
    assert not caplog.records


def test_a_proxy_is_left_to_the_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert prepare_hub() is False
    assert "HF_HUB_OFFLINE" not in os.environ
