"""What a start says of an upload to the hub that could not succeed; nobody is asked."""

import re
from pathlib import Path

import pytest
from fake_hub import TOKEN
from huggingface_hub import constants

from megatron_opsft.config import Config
from megatron_opsft.config.load import load_config, to_yaml
from megatron_opsft.errors import UserError
from megatron_opsft.run.start import check
from megatron_opsft.run.start.check import check_hub


@pytest.fixture(autouse=True)
def logged_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))


def config_of(*words: str) -> Config:
    return load_config(None, ["model.path=m", "data.train=d", "run.dir=runs/a", *words])


@pytest.mark.parametrize("name", ["me/short-7B_v1.5", "a/b", "my-lab/x"])
def test_names_that_the_hub_takes(name: str) -> None:
    assert config_of(f"export.push_to_hub={name}").export.push_to_hub == name


@pytest.mark.parametrize(
    "name",
    ["short", "me/", "/short", "a/b/c", "me/a b", "me/-a", "me/a--b", "me/a..b", "me/a.git", "mé/a"]
    + ["me/" + "a" * 94],
)
def test_other_names_are_refused(name: str) -> None:
    said = re.escape(f"{name!r} is no repository of the hub; write user/name in letters")
    with pytest.raises(UserError, match=f"export.push_to_hub.*{said}"):
        config_of(f"export.push_to_hub={name}")


def test_a_start_needs_a_model_a_package_the_network_and_a_token(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check_hub(config_of())  # uploads nothing
    config = config_of("export.push_to_hub=me/a")

    def refused(config: Config) -> str:
        with pytest.raises(UserError) as caught:
            check_hub(config)
        (line,) = str(caught.value).splitlines()
        assert line.startswith("export.push_to_hub=me/a")
        return line

    assert "a run with run.steps=0 writes no model" in refused(
        config_of("export.push_to_hub=me/a", "run.steps=0")
    )
    assert "needs a token that may write there: set HF_TOKEN, or run" in refused(config)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    check_hub(config)
    monkeypatch.delenv("HF_TOKEN")
    (tmp_path / "token").write_text(TOKEN)  # what `hf auth login` leaves
    check_hub(config)
    with monkeypatch.context() as offline:
        offline.setenv("HF_HUB_OFFLINE", "1")
        said = refused(config)
    assert "HF_HUB_OFFLINE=1 is set" in said and "`hf upload me/a runs/a/hf .` later" in said
    monkeypatch.setattr(check, "is_installed", lambda name: name != "huggingface_hub")
    assert "needs the huggingface_hub package: pip install" in refused(config)
    assert TOKEN not in to_yaml(config)
