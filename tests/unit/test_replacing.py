"""What is never overwritten, though it be a model: sources, working and home directory, files.

Which directories may be overwritten: properties/test_out_properties.py.
"""

import re
from pathlib import Path

import pytest

from megatron_opsft.errors import UserError
from megatron_opsft.models.storage.replacing import check_out


def test_what_a_killed_run_left_of_its_card_is_no_obstacle(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", ".README.md.partial"):
        (tmp_path / name).touch()
    check_out(tmp_path, [], overwrite=True)
    (tmp_path / ".notes.md.partial").touch()
    with pytest.raises(
        UserError, match=r"holds \.notes\.md\.partial, which is not part of a model"
    ):
        check_out(tmp_path, [], overwrite=True)


def test_what_is_needed_is_kept_and_what_holds_it_by_any_path_that_leads_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, home, source = (tmp_path / name for name in ("place/work", "homes/me", "models/source"))
    for directory in (work, home, source):
        directory.mkdir(parents=True)
        for model in (directory, directory.parent):
            (model / "config.json").touch()
            (model / "model.safetensors").touch()
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(home))
    link, gone, file = (tmp_path / name for name in ("link", "gone", "file"))
    link.symlink_to(source)
    gone.symlink_to(tmp_path / "nothing")
    file.touch()
    for out, words in (
        (source, "is what is read"),
        (link, "is what is read"),
        (source.parent, f"holds what is read ({source})"),
        (work, "is the working directory"),
        (Path("."), "is the working directory"),
        (work.parent, "holds the working directory"),
        (home, "is the home directory"),
        (home.parent, "holds the home directory"),
        (Path("/"), "holds what is read"),
        (file, "is a file"),
        (gone, "is a link to"),
    ):
        with pytest.raises(UserError, match=re.escape(f"{out} {words}")):
            check_out(out, [source], overwrite=True)
    with pytest.raises(UserError, match=f"{source} holds what is read"):
        check_out(source, [link / "model.safetensors"], overwrite=True)
    with pytest.raises(UserError, match="is a link to"):
        check_out(gone, [], overwrite=False)
