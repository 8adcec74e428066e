"""A hub that cannot be reached: one line at once, and offline mode from then on."""

import logging
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import datasets
import huggingface_hub.constants
import pytest
from forked_cli import ForkedCli

from megatron_opsft.data.problems import load_problems
from megatron_opsft.data.sources import check_source
from megatron_opsft.errors import UserError
from megatron_opsft.runtime.libraries import check_cached, prepare_hub
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


def test_a_job_without_network_says_at_its_start_what_is_not_in_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cli: ForkedCli
) -> None:
    words = ["train", "examples/configs/quickstart.yaml", f"run.dir={tmp_path / 'run'}"]
    offline = "import os; os.environ['HF_HUB_OFFLINE'] = '1'"
    for key in ("model.path", "data.train"):
        error = cli.run([*words, f"{key}=org/Some-Data_Set"], prelude=offline).error
        assert f"{key.split('.train')[0]}=org/Some-Data_Set is not in the Hugging Face" in error
        assert "run `megatron-opsft fetch CONFIG`" in error
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(UserError, match="not in the Hugging Face cache"):
        check_source("org/Some-Data_Set")
    for folder in ("hub/datasets--org--Some-Data_Set/snapshots/1", "datasets/org___some-data_set"):
        (tmp_path / folder).mkdir(parents=True)
        check_source("org/Some-Data_Set")
        shutil.rmtree(tmp_path / folder)
    with pytest.raises(UserError, match="model.path=org/M is not in"):
        check_cached("models", "org/M", "model.path")
    (tmp_path / "hub/models--org--M/snapshots/1").mkdir(parents=True)
    check_cached("models", "org/M", "model.path")


def test_fetch_reads_what_a_run_reads(cli: ForkedCli) -> None:
    ended = cli.run(["fetch", "examples/configs/quickstart.yaml"])
    assert ended.exit_code == 0, ended.stderr
    assert ended.stdout.startswith("tiny_reasoner and ")


def test_a_proxy_is_left_to_the_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert prepare_hub() is False
    assert "HF_HUB_OFFLINE" not in os.environ
