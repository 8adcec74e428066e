"""A path that leads nowhere names the directory that it counts from, and the file that is meant."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_cli import ROOT

from megatron_opsft import errors
from megatron_opsft.commands.evaluate.settings import check_settings, load_settings
from megatron_opsft.config.load import load_config
from megatron_opsft.errors import UserError, looked_in
from megatron_opsft.methods.facts import read_references
from megatron_opsft.models.storage.model_paths import local_model
from megatron_opsft.run.start.check import check_run

NAMES = ("ok.csv", "own.jinja", "model/a", "lora", "r.parquet", "rates", "lengths.jsonl")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A YAML file beside everything that it names; the working directory is another."""
    monkeypatch.setattr(errors, "_config_files", [])
    folder, here = tmp_path / "mine", tmp_path / "here"
    here.mkdir()
    for name in NAMES:
        (folder / name).mkdir(parents=True)
    monkeypatch.chdir(here)
    text = (ROOT / "examples/configs/quickstart.yaml").read_text()
    (folder / "run.yaml").write_text(text)
    return Path("../mine/run.yaml")


def error_of(file: Path, *keys: str) -> str:
    config = load_config(file, ["run.dir=new", *keys])
    with pytest.raises(UserError) as caught:
        check_run(config, resume=False, overwrite=False, must_exist=False, world_size=1)
    return str(caught.value)


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        (["data.train=ok.csv"], "ok.csv"),
        (["eval.data=ok.csv"], "ok.csv"),
        (["eval.more={a: ok.csv}"], "ok.csv"),
        (['data.train=[{path: "ok.csv"}]'], "ok.csv"),
        (["data.template=own.jinja"], "own.jinja"),
        (["model.path=./model/a"], "model/a"),
        (["model.path=model/a"], "model/a"),
        (["data.train=model/a"], "model/a"),
        (["model.adapter=lora", "lora.rank=8"], "lora"),
        (["method.name=crst", "data.responses=r.parquet"], "r.parquet"),
    ],
)
def test_every_key_says_where_it_was_looked_for_and_what_is_meant(
    file: Path, tmp_path: Path, keys: list[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    said = error_of(file, *keys)
    place, beside = re.escape(str(tmp_path / "here")), re.escape(f"../mine/{name}")
    assert re.search(f" in {place}, from .* lies beside run.yaml: write {beside}", said), said


def test_what_lies_nowhere_names_the_directory_alone(file: Path, tmp_path: Path) -> None:
    load_config(file)
    here = tmp_path / "here"
    assert looked_in("no.csv") == f" in {here}"
    assert looked_in(tmp_path / "no.csv") == looked_in("/no.csv") == ""
    (here / "ok.csv").touch()
    assert looked_in("ok.csv") == ""
    with pytest.raises(UserError, match=rf"cannot be read: No such file .* in {here}$"):
        read_references(Path("no.jsonl"))
    with pytest.raises(UserError, match=rf"=./no is not a directory in {here}; give"):
        local_model("./no", option="--model")


def test_an_evaluation_s_files_say_so_too(file: Path, tmp_path: Path) -> None:
    (tmp_path / "mine/eval.yaml").write_text(json.dumps({"data": {"mine": "ok.csv"}}))
    options = {"model": "tiny_reasoner", "out": "new"}
    settings = load_settings(tmp_path / "mine/eval.yaml", [], options)
    said = rf"no file ok.csv in {tmp_path}/here, .* write {tmp_path}/mine/ok.csv"
    with pytest.raises(UserError, match=f"--data mine: there is {said}"):
        check_settings(settings)
