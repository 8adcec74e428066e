"""Work that takes long says how far it is."""

import pytest

from megatron_opsft.runtime.progress import Progress


def test_work_says_how_much_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("hidden", 4, unit="B", read=lambda: (4, ""), shown=False) as hidden:
        hidden.update(4)
        hidden.look()
    read = iter([(30, "right"), (40, "wrong")])
    with Progress("model", 40, unit=" samples", done=10, read=lambda: next(read)) as asked:
        asked.look()  # too early to say it again
        asked.mininterval = 0
        asked.look()
    said = capsys.readouterr().err
    assert "hidden" not in said
    assert all(text in said for text in ("10/40", "30/40", "samples/s, right]", "40/40", "wrong]"))
