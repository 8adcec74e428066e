"""`report --watch`: when the page is written again, and when it is over."""

import os
from pathlib import Path

from made_runs import make_evaluation, make_run

from megatron_opsft.report.page.parts import Parts, parts_of
from megatron_opsft.report.page.watch import watch


def test_written_on_change_alone_until_the_run_has_ended(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", finished=False)
    written: list[Parts] = []
    sleeps: list[float] = []

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        if len(sleeps) == 3:
            with (run / "metrics.jsonl").open("a") as file:
                file.write('{"step": 4}\n')
        if len(sleeps) == 5:
            (run / "summary.json").write_text("{}")

    assert watch([run], 7.0, written.append, sleep=sleep) == "finished"
    assert sleeps == [7.0] * 5
    assert [parts.runs for parts in written] == [[run], [run]]


def test_a_run_that_gives_no_sign_of_life_ends_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", finished=False)
    written: list[Parts] = []
    ended = watch([run], 0.01, written.append, silent_seconds=0.05)
    assert ended.startswith("not finished, but nothing has changed")
    assert len(written) == 1


def test_a_study_ends_with_a_table_that_is_younger_than_its_runs(tmp_path: Path) -> None:
    member = tmp_path / "runs/a-s0"
    make_run(member / "train")
    make_evaluation(member / "eval", "a", 100, 7)
    (member / "definition.json").write_text("{}")
    parts = parts_of([tmp_path])
    assert (parts.runs, parts.evaluations) == ([member / "train"], [member / "eval"])
    table = tmp_path / "table.json"
    table.write_text("[]")
    os.utime(table, (1, 1))
    written: list[Parts] = []

    def sleep(seconds: float) -> None:
        os.utime(table)

    assert watch([tmp_path], 1.0, written.append, sleep=sleep) == "finished"
    assert len(written) == 1
