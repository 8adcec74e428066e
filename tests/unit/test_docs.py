"""README, CONTRIBUTING and docs/: links, commands, keys, exit codes and variables are there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import calls_in, command_of

from megatron_opsft.commands.cli import PROGRAM
from megatron_opsft.commands.command_line import Program, reference_table
from megatron_opsft.commands.evaluate.settings import EvalSettings
from megatron_opsft.commands.launch.commands import FINAL_EXIT_CODES
from megatron_opsft.commands.study.study_file import Study
from megatron_opsft.config.load import load, load_config
from megatron_opsft.errors import ANSWER_IS_NO
from megatron_opsft.runtime.failed_rank import PEER_LOST_EXIT_CODE
from megatron_opsft.runtime.phase import REQUEUE_EXIT_CODE

ROOT = Path(__file__).parents[2]
TREE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
CLUSTER = (ROOT / "docs/cluster.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FILES = re.compile(r"\b(?:examples|slurm|tools|benchmarks|docs|tests)/[\w/.*-]+\.(?:sh|py|yaml|md)")


def commands_of(text: str) -> list[list[str]]:
    """The words behind `megatron-opsft` in every line of code that calls it."""
    code = "\n".join(re.findall(r"```(?:bash|sh)?\n(.*?)```", text, re.DOTALL))
    code += "\n" + "\n".join(re.findall(r"`([^`\n]+)`", text))
    return calls_in(code.replace("\\\n", " ").splitlines())


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere_and_files_and_commands_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        linked = (page.parent / file) if file else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors_of(linked), target
    for name in FILES.findall(text):
        assert list(ROOT.glob(name)), name
    for words in commands_of(text):
        command, rest = command_of(words)
        assert command is not PROGRAM, f"no command {words}"
        known = {name for parameter in command.params for name in parameter.opts} | {"--help"}
        if isinstance(command, Program) and command.keys_of is not None:
            keys = re.findall(r"^\| `([\w.]+)`", reference_table(command.keys_of), re.MULTILINE)
            known |= {f"--{key.replace('_', '-')}" for key in keys}
        used = {word.split("=")[0] for word in rest if word.startswith("--")}
        assert used <= known, words


def test_the_reference_is_the_generated_one() -> None:
    text = (ROOT / "docs/config.md").read_text(encoding="utf-8")
    between = text.split("<!-- config reference -->")[1].split("<!-- end")[0]
    assert between.strip() == reference_table()


def test_every_setting_of_an_evaluation_is_named() -> None:
    text = (ROOT / "docs/evaluation.md").read_text(encoding="utf-8").split("## All settings")[1]
    named = set(re.findall(r"`(\w+)(?:\.\*)?`", text))
    assert EvalSettings.model_fields.keys() <= named


def test_the_tree_has_every_folder_and_top_level_module() -> None:
    package = ROOT / "megatron_opsft"
    wings = [(path, "  ") for path in package.glob("*/__init__.py")]
    rooms = [
        (path, "    ")
        for wing in ("commands", "run", "trainer", "models")
        for path in (package / wing).glob("*/__init__.py")
    ]
    for path, indent in wings + rooms:
        assert re.search(rf"^{indent}{path.parent.name}/ ", TREE, re.MULTILINE), path
    assert all(path.name in TREE for path in package.glob("[!_]*.py"))


def test_shipped_configurations_and_those_in_the_docs_load(tmp_path: Path) -> None:
    assert all(load_config(p).run.steps > 0 for p in (ROOT / "examples/configs").glob("*.yaml"))
    for path in (ROOT / "examples/eval").glob("*.yaml"):
        assert load(EvalSettings, path).temperature == 0.6
    pages = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("first_run", "data"))]
    blocks = [b for p in pages for b in re.findall(r"```yaml\n(.*?)```", p.read_text(), re.DOTALL)]
    assert len(blocks) >= 3
    file = tmp_path / "block.yaml"
    for block in blocks:
        file.write_text(block)
        model = [] if "model:" in block else ["model.path=tiny_reasoner"]
        assert load_config(file, model).data.sources


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert {page.stem for page in PAGES[2:]} - {"index"} <= {f.name for f in tmp_path.iterdir()}


def test_every_variable_of_the_job_scripts_is_in_the_table() -> None:
    named = set()
    for path in (ROOT / "slurm").glob("*.sh"):
        text = path.read_text(encoding="utf-8")
        named |= set(re.findall(r"^(?:export )?([A-Z_]+)=\$\{\1:[-?]", text, re.MULTILINE))
    assert {"CONFIG", "MODEL", "VENV", "MAX_RESTARTS", "HF_HOME"} <= named
    assert named - {"JOB"} - set(re.findall(r"`([A-Z_]+)`", CLUSTER)) == set()


def test_exit_codes() -> None:
    codes = dict(re.findall(r"^\| (\d+) \| .* \| (.*?) ?\|$", CLUSTER, re.MULTILINE))
    starts_again = {int(code) for code, answer in codes.items() if answer == "yes"}
    assert starts_again == {1, PEER_LOST_EXIT_CODE}
    final = {0, ANSWER_IS_NO, *FINAL_EXIT_CODES, REQUEUE_EXIT_CODE}
    assert {int(code) for code in codes} - starts_again == final


def test_every_method_of_the_paper_s_study_has_figures_in_its_table_and_chart() -> None:
    page = (ROOT / "docs/paper.md").read_text(encoding="utf-8")
    chart = (ROOT / "docs/paper_accuracy_length.svg").read_text(encoding="utf-8")
    study = load(Study, ROOT / "examples/studies/paper_tiny.yaml")
    first_table = page.partition("| question")[0]
    cot = float(re.findall(r"\| CoT \| [\d.]+ \| [\d.]+ \| ([\d.]+)", page)[0])
    for name in study.sections["methods"].runs:
        (row,) = re.findall(rf"^\| {re.escape(name)} \| (.*) \|$", first_table, re.M)
        cells = [cell.partition(" ±")[0] for cell in row.split(" | ")]
        accuracy, pass_at_n, tokens, ratio, efficiency = map(float, cells[:5])
        assert accuracy <= pass_at_n <= 100
        # Tokens have one digit.
        assert ratio == pytest.approx(100 * tokens / cot, abs=0.051 * 100 / cot + 0.051), name
        assert efficiency == pytest.approx(100 * accuracy / tokens, rel=0.004), name
        assert f">{name}</text>" in chart
