"""What is never overwritten, though it be a model: sources, working and home directory, files.

Which directories may be overwritten: properties/test_out_properties.py.
"""

from pathlib import Path

import pytest

from megatron_opsft.errors import UserError
from megatron_opsft.storage.replacing import check_out


def a_model(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_text("")
    return directory


def refusal(out: Path, *sources: Path, overwrite: bool = True) -> str:
    with pytest.raises(UserError) as error:
        check_out(out, sources, overwrite=overwrite)
    assert "\n" not in str(error.value)
    return str(error.value)


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


def test_a_file_and_a_link_to_nothing_are_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    assert "is a file" in refusal(tmp_path / "file")
    (tmp_path / "out").symlink_to(tmp_path / "gone")
    for overwrite in (False, True):
        assert "is a link to" in refusal(tmp_path / "out", overwrite=overwrite)
