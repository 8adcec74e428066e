"""Work that takes long says how far it is."""

import pytest

from megatron_opsft.runtime.progress import Progress


def test_work_says_how_much_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("hidden", 4, unit="B", shown=False) as hidden:
        hidden.update(4)
    with Progress("model", 40, unit=" samples", done=10, read=lambda: (30, "right")) as asked:
        asked.look()  # too early to say it again
        asked.mininterval = 0
        asked.look()
    said = capsys.readouterr().err
    assert "hidden" not in said
    assert "10/40" in said and "30/40" in said and "samples/s, right]" in said
