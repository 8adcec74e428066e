"""What an overwritten output may have been: a model, a conversion, an empty directory."""

from pathlib import Path

import pytest

from megatron_opsft.errors import UserError
from megatron_opsft.storage.replacing import check_out


def a_model(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_text("")
    return directory


def a_conversion(directory: Path) -> Path:
    directory.mkdir(parents=True)
    for name in (".metadata", "metadata.json", "conversion.json"):
        (directory / name).write_text("{}")
    return directory


def refusal(out: Path, *sources: Path, overwrite: bool = True) -> str:
    with pytest.raises(UserError) as error:
        check_out(out, sources, overwrite=overwrite)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_models_conversions_and_empty_directories_may_be_replaced(tmp_path: Path) -> None:
    source = a_model(tmp_path / "source")
    (tmp_path / "empty").mkdir()
    for out in (a_model(tmp_path / "a"), a_conversion(tmp_path / "b"), tmp_path / "empty"):
        check_out(out, [source], overwrite=True)
        assert "--overwrite" in refusal(out, source, overwrite=False)
    (tmp_path / "a" / "additional_chat_templates").mkdir()
    check_out(tmp_path / "a", [source], overwrite=True)
    check_out(tmp_path / "new", [source], overwrite=False)


def test_everything_else_is_kept(tmp_path: Path) -> None:
    """A checkpoint of a run is neither made by a conversion nor made again by one."""
    files, folders, checkpoint = (tmp_path / name for name in ("files", "folders", "checkpoint"))
    files.mkdir()
    (files / "config.json").write_text("of another program")
    a_model(folders / "below")
    a_conversion(checkpoint)
    (checkpoint / "conversion.json").unlink()
    assert "neither a model nor a conversion" in refusal(files)
    assert "holds the directory below" in refusal(folders)
    assert "neither a model nor a conversion" in refusal(checkpoint)
    assert "is a file" in refusal(files / "config.json")


def test_sources_working_home_and_root_directory_and_their_parents_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are refused though they are models themselves, and by any path that leads there."""
    place, home, source = (tmp_path / name for name in ("place/work", "homes/me", "models/source"))
    for directory in (place, home, source):
        a_model(directory)
    for directory in (place.parent, home.parent, source.parent):
        (directory / "config.json").write_text("{}")
        (directory / "model.safetensors").write_text("")
    monkeypatch.chdir(place)
    monkeypatch.setenv("HOME", str(home))
    link = tmp_path / "link"
    link.symlink_to(source)
    kinds = {"read": source, "working directory": place, "home directory": home}
    for kind, directory in kinds.items():
        assert f"is {'what is read' if kind == 'read' else 'the ' + kind}" in refusal(
            directory, source
        )
        assert "holds" in refusal(directory.parent, source)
        assert kind in refusal(directory.parent, source)
    assert "is the working directory" in refusal(Path("."), source)
    assert "is what is read" in refusal(link, source)
    assert "holds" in refusal(Path("/"), source)
    assert "holds" in refusal(source, link / "model.safetensors")


def test_a_link_to_nothing_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "gone")
    for overwrite in (False, True):
        assert "is a link to" in refusal(tmp_path / "out", overwrite=overwrite)
