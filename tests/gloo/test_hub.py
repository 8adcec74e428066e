"""What a finished run uploads to the hub, and what it never writes down."""

import json
from pathlib import Path

import pytest
from fake_hub import TOKEN, asks, fake_hub
from forked_cli import ForkedCli
from processes import rank_preludes
from small_run import QUICKSTART, SMALL_RUN

ONE_STEP = ["train", QUICKSTART, *SMALL_RUN, "run.steps=1", "checkpoint.every=0"]
PUSH = "export.push_to_hub=me/short"


def test_a_finished_run_of_two_ranks_uploads_its_model_once(cli: ForkedCli, tmp_path: Path) -> None:
    """Every file of hf/ with its card, to a private repository; the token is in no file."""
    words = [*ONE_STEP, PUSH, f"run.dir={tmp_path}"]
    with fake_hub() as hub:
        both = [cli.start(words, asks(hub) + prelude) for prelude in rank_preludes(2)]
        first, other = (run.wait() for run in both)
    assert (first.exit_code, other.exit_code) == (0, 0), first.stderr
    made = {"name": "short", "organization": "me", "visibility": "private"}
    assert [made.items() <= one.items() for one in hub.created] == [True]
    assert hub.tokens <= {f"Bearer {TOKEN}", ""} and f"Bearer {TOKEN}" in hub.tokens
    written = {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}
    assert hub.files == written
    assert {"README.md", "model.safetensors", "config.json", "tokenizer.json"} <= hub.files.keys()
    card = hub.files["README.md"].decode()
    assert 'pipeline("text-generation", "me/short")' in card
    assert "after 1 step of `on_policy_sft`" in card
    assert f"uploaded to {hub.endpoint}/me/short" in first.stderr
    said = first.stdout + first.stderr + other.stdout + other.stderr
    assert TOKEN not in said
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes(), path
    assert "push_to_hub: me/short" in (tmp_path / "config.yaml").read_text()
    assert json.loads((tmp_path / "summary.json").read_text())["uploaded_to"] == "me/short"


@pytest.mark.parametrize(
    ("refuses", "exists_as", "key", "reason"),
    [
        ("/commit/main", None, "export.private=false", "403"),
        ("", False, "export.private=true", "me/short is public, and export.private=true"),
    ],
)
def test_a_failed_upload_is_a_warning_with_the_command_for_later(
    cli: ForkedCli, tmp_path: Path, refuses: str, exists_as: bool | None, key: str, reason: str
) -> None:
    words = [*ONE_STEP, PUSH, key, f"run.dir={tmp_path}"]
    with fake_hub() as hub:
        hub.refuses, hub.is_private = refuses, exists_as
        ended = cli.run(words, asks(hub))
    assert ended.exit_code == 0, ended.stderr
    command = f"hf upload me/short {tmp_path / 'hf'} ."
    if key.endswith("true"):
        command += " --private"
    (said,) = [line for line in ended.stderr.splitlines() if "was not uploaded" in line]
    assert said.endswith(f"; later: {command}") and reason in said
    assert hub.files == {}
    assert json.loads((tmp_path / "summary.json").read_text())["model_step"] == 1
    assert (tmp_path / "hf/model.safetensors").is_file()


def test_a_finished_run_that_is_started_again_uploads_its_model_once(
    cli: ForkedCli, tmp_path: Path
) -> None:
    """Its weights stay, its card names the repository; what failed is tried again."""
    words = [*ONE_STEP, f"run.dir={tmp_path}"]
    assert cli.run(words).exit_code == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}
    place = f'pipeline("text-generation", "{tmp_path / "hf"}")'
    assert place in before["README.md"].decode()
    words += ["--resume", PUSH]
    with fake_hub() as hub:
        hub.refuses = "/commit/main"
        failed = cli.run(words, asks(hub))
        assert failed.exit_code == 0, failed.stderr
        assert f"; later: hf upload me/short {tmp_path / 'hf'} . --private" in failed.stderr
        assert hub.files == {}
        hub.refuses = ""
        uploaded = cli.run(words, asks(hub))
        assert uploaded.exit_code == 0, uploaded.stderr
        assert "the run is finished; its upload is left" in uploaded.stdout
        assert f"uploaded to {hub.endpoint}/me/short" in uploaded.stderr
        asked = len(hub.requests)
        again = cli.run(words, asks(hub))
        assert (again.exit_code, len(hub.requests)) == (0, asked), again.stderr
        assert "the run is finished; nothing is left" in again.stdout
    card = before["README.md"].decode().replace(place, 'pipeline("text-generation", "me/short")')
    assert hub.files == {**before, "README.md": card.encode()}
    assert json.loads((tmp_path / "summary.json").read_text())["uploaded_to"] == "me/short"


def test_a_finished_run_of_two_ranks_uploads_from_one_of_them(
    cli: ForkedCli, tmp_path: Path
) -> None:
    words = [*ONE_STEP, f"run.dir={tmp_path}"]
    assert cli.run(words).exit_code == 0
    words += ["--resume", PUSH]
    with fake_hub() as hub:
        both = [cli.start(words, asks(hub) + prelude) for prelude in rank_preludes(2)]
        ended = [run.wait() for run in both]
    assert [run.exit_code for run in ended] == [0, 0], ended[0].stderr
    assert len(hub.created) == 1 and "model.safetensors" in hub.files
