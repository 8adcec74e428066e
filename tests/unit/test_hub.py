"""A hub out of reach, and jobs without a network: one line that says what is not there."""

import shutil
from pathlib import Path

import pytest
from forked_cli import ForkedCli
from huggingface_hub.errors import LocalEntryNotFoundError

from megatron_opsft.data.sources import check_source
from megatron_opsft.errors import UserError
from megatron_opsft.runtime.libraries import check_cached
from megatron_opsft.storage.model_paths import resolve_model


def test_a_model_out_of_reach_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of data: test_problems.py."""

    def refuse(*_: object, **__: object) -> None:
        raise LocalEntryNotFoundError("no connection\nmore")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with monkeypatch.context() as online:
        online.delenv("HF_HUB_OFFLINE", raising=False)
        with pytest.raises(UserError, match=r"could not be fetched .*no connection\); download it"):
            resolve_model("nobody/nothing")
    with pytest.raises(UserError, match="HF_HUB_OFFLINE=1 is set"):
        resolve_model("nobody/nothing")


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
    (tmp_path / "hub/models--org--M/snapshots/1").mkdir(parents=True)
    check_cached("models", "org/M", "model.path")


def test_fetch_reads_what_a_run_reads(cli: ForkedCli) -> None:
    ended = cli.run(["fetch", "examples/configs/quickstart.yaml"])
    assert ended.exit_code == 0, ended.stderr
    assert ended.stdout.startswith("tiny_reasoner and ")
