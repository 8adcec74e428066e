"""Models and data of which only a part is there: pointers of Git LFS, an adapter alone."""

import re
import shutil
from pathlib import Path

import pytest
from forked_cli import ROOT

from megatron_opsft.config import Config
from megatron_opsft.config.load import load_config
from megatron_opsft.errors import UserError
from megatron_opsft.preflight.check import check_run
from megatron_opsft.storage.model_paths import ASSETS, TINY_REASONER, resolve_config

QUICKSTART = ROOT / "examples/configs/quickstart.yaml"


def config_of(run_dir: Path, *overrides: str) -> Config:
    return load_config(QUICKSTART, [f"run.dir={run_dir}", *overrides])


def check(config: Config) -> None:
    check_run(config, resume=False, overwrite=False, must_exist=False, world_size=1)


POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n"
    "size 12345\n"
)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "tokenizer.json", "config.json", "a.jsonl", "b.parquet", "set"]
)
def test_a_pointer_of_git_lfs_names_the_command_that_fetches_the_file(
    tmp_path: Path, name: str
) -> None:
    model = shutil.copytree(ASSETS / TINY_REASONER, tmp_path / "model")
    pointer = (model if (model / name).exists() else tmp_path) / name
    override = f"data.train={pointer}"
    if name == "set":  # as written by save_to_disk
        pointer = pointer / "train" / "data-00000-of-00001.arrow"
        pointer.parent.mkdir(parents=True)
    pointer.write_text(POINTER)
    if pointer.parent == model:
        override = f"model.path={model}"
    message = f"{pointer} is only Git LFS's pointer to the file: run `git lfs pull` in "
    with pytest.raises(UserError, match=re.escape(message + str(pointer.parent))):
        check(config_of(tmp_path / "run", override))
    if name == "model.safetensors":
        assert resolve_config(str(model)) == model  # for a plan, config.json is enough


def test_an_adapter_is_to_be_merged_first(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(UserError, match="holds a LoRA adapter and not the whole model; merge it"):
        check(config_of(tmp_path / "run", f"model.path={tmp_path}"))
