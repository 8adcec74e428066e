"""`report --figures` of runs, evaluations, a study, a diagnosis and a scaling experiment."""

import json
from pathlib import Path

from forked_cli import ForkedCli
from made_diagnosis import make_diagnosis
from made_runs import make_evaluation, make_run
from test_figures import evaluations_in, rows_of, texts_of
from test_plan_measured import nodes_run
from test_study import METHODS, plan_of

from megatron_opsft.commands.diagnose.page import describe_divergence
from megatron_opsft.commands.report.chart import Bars
from megatron_opsft.commands.report.figures import name_pictures
from megatron_opsft.commands.study.page import write_outputs
from megatron_opsft.commands.study.results import read_study_rows
from megatron_opsft.runtime.durable import json_lines


def files_in(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_the_command_writes_a_run_and_evaluations_and_says_so_last(
    cli: ForkedCli, tmp_path: Path
) -> None:
    run, out = make_run(tmp_path / "run"), tmp_path / "new/figures"
    evaluations = evaluations_in(tmp_path, "long", "short")
    words = ["report", run, *evaluations, "--html", tmp_path / "page.html", "--figures", out]
    ended = cli.run(words)
    assert ended.exit_code == 0, ended.stderr
    files = files_in(out)
    charts = [name for name in files if name.endswith(".pdf")]
    assert len(files) == 2 * len(charts) + 2 and {"accuracy.pdf", "accuracy_length.pdf"} <= {
        *charts
    }
    assert ended.stdout.splitlines()[-1] == (
        f"figures: {len(charts)} charts as PDF and SVG, table.tex and table.md: {out}"
    )
    tex = files["table.tex"].decode()
    assert r"mean response tokens & 80.0 & 77.0 & $-$3.7 \% \\" in tex and "short & " in tex
    again = cli.run([*words, "--overwrite"])
    assert again.exit_code == 0 and files_in(out) == files


def test_no_figure_is_replaced_without_overwrite(cli: ForkedCli, tmp_path: Path) -> None:
    run, out = make_run(tmp_path / "run"), tmp_path / "figures"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    (out / "accuracy.pdf").write_text("mine")
    (out / "table.tex").write_text("mine")
    ended = cli.run(["report", run, "--figures", out])
    assert f"report: {out}/accuracy.pdf and 1 more exist; name another directory" in ended.error
    assert ended.stdout == "" and not (run / "report.html").exists()
    assert {*files_in(out).values()} == {b"mine"}
    assert cli.run(["report", run, "--figures", out, "--overwrite"]).exit_code == 0
    assert (out / "notes.txt").read_text() == "mine"
    assert (out / "accuracy.pdf").read_bytes().startswith(b"%PDF")
    said = cli.run(["report", run, "--figures", out / "notes.txt"]).error
    assert f"--figures {out}/notes.txt is a file; name a directory" in said


def test_a_library_that_is_missing_is_one_line(cli: ForkedCli, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    prelude = (
        "import importlib.util as u\n"
        "found = u.find_spec\n"
        "u.find_spec = lambda name, *more: None if name == 'matplotlib' else found(name, *more)"
    )
    ended = cli.run(["report", run, "--figures", tmp_path / "f"], prelude)
    assert ended.error == (
        "error: report --figures needs the matplotlib package: pip install '.[figures]'"
    )
    assert not (tmp_path / "f").exists() and ended.stdout == ""
    assert cli.run(["report", run], prelude).exit_code == 0


def test_a_study_s_directory_is_reported_from_its_files(cli: ForkedCli, tmp_path: Path) -> None:
    """Also after its file and configuration have gone."""
    plan = plan_of(tmp_path, METHODS, title="Of & by")
    for run in plan.runs:
        if run.name != "crst":
            make_evaluation(run.evaluation, run.label, 200 if run.name == "base" else 50, 6)
    write_outputs(tmp_path, plan.study, read_study_rows(tmp_path, plan))
    (tmp_path / "study.yaml").unlink()
    page = (tmp_path / "report.html").read_bytes()
    ended = cli.run(["report", tmp_path, "--figures", tmp_path / "figures"])
    assert ended.exit_code == 0, ended.stderr
    assert "49.5" not in ended.stdout and "54.5 ± 0.0" in ended.stdout
    assert (tmp_path / "report.html").read_bytes() == page
    files = files_in(tmp_path / "figures")
    assert {"accuracy_length.pdf", "lengths.svg", "accuracy_at_budget.svg"} <= files.keys()
    tex = files["table.tex"].decode()
    assert (
        "n = 10 problems × 2 responses (base); n = 10 problems × 2 responses × 2 seeds (ours)"
        in (" ".join(line.removeprefix("% ") for line in tex.splitlines()))
    )
    assert r"54.5 {\scriptsize $\pm$ 0.0}" in tex or r"\textbf{54.5} {\scriptsize $\pm$ 0.0}" in tex
    both = cli.run(["report", tmp_path, tmp_path, "--html", tmp_path / "p"])
    assert "a study has a report of its own; name it alone" in both.error
    (tmp_path / "study.json").unlink()
    said = cli.run(["report", tmp_path]).error
    assert f"study.json: not found; `megatron-opsft study FILE --out {tmp_path} --page`" in said
    (tmp_path / "study.json").write_text("{}")
    assert (
        "study.json: title: Field required; `megatron-opsft" in cli.run(["report", tmp_path]).error
    )


def test_a_diagnosis_has_its_cloud_and_its_tables(cli: ForkedCli, tmp_path: Path) -> None:
    made, out = make_diagnosis(tmp_path), tmp_path / "figures"
    told = {"kind": "diagnosis", "original": "hub/long", "path": "runs/short/"}
    manifest = made / "manifest.json"
    manifest.write_text(json.dumps({**told, "identity": {"format": 2}}))
    ended = cli.run(["report", made, "--figures", out])
    assert ended.exit_code == 0, ended.stderr
    assert ended.stdout.startswith("long against short: 60 tokens of 4 responses")
    assert (made / "report.html").is_file()
    files = files_in(out)
    assert {name[:-4] for name in files if name.endswith(".pdf")} == (
        {"words", "divergence_by_token", "divergence_along"}
    )
    text = texts_of(files["words.svg"])
    assert text.startswith("Wait n = ") or text.endswith("Wait")
    assert "n = 60 tokens of 4 responses" in texts_of(files["divergence_by_token.svg"])
    tex = files["table.tex"].decode()
    assert "Wait & 1 & 5.000 & 75.0 \\% & 10.0 \\% & \\textless{}/think\\textgreater{}" in tex
    rows = [*json_lines(made / "tokens.jsonl")]
    contents = describe_divergence(rows, "long", "short")
    bars = name_pictures(contents.sections)["divergence_by_token"]
    assert isinstance(bars, Bars) and (bars.rows[0].label, bars.rows[0].value) == ("Wait", 14.0)
    manifest.write_text(json.dumps({**told, "identity": {"format": 1}}))
    assert "a diagnosis of an earlier version" in cli.run(["report", made]).error
    manifest.write_text(json.dumps({**told, "identity": {"format": 2}}))
    (made / "tokens.jsonl").unlink()
    assert "no response is diagnosed yet" in cli.run(["report", made]).error


def test_a_scaling_experiment_says_over_how_many_steps_its_medians_are(
    cli: ForkedCli, tmp_path: Path
) -> None:
    for nodes, seconds in ((1, 10.0), (2, 6.25)):
        nodes_run(tmp_path, nodes, seconds)
    ended = cli.run(["report", tmp_path, "--figures", tmp_path / "figures"])
    assert ended.exit_code == 0, ended.stderr
    files = files_in(tmp_path / "figures")
    text = texts_of(files["seconds_by_nodes.svg"])
    assert "n = 10 steps a point; medians; lines: measured; dots: planned" in text
    assert "efficiency (%)" in texts_of(files["efficiency_by_nodes.svg"])
    rows = rows_of(files["table.tex"].decode())
    assert rows[0][:2] == ["nodes", "GPUs"] and rows[2][:2] == ["2", "16"]
