"""README, CONTRIBUTING and docs/ say what the code does: the references of all keys are the
generated ones, paths exist.
"""

import re
from pathlib import Path

from megatron_opsft.config import Config
from megatron_opsft.config.load import load, load_config
from megatron_opsft.config.reference import reference_table
from megatron_opsft.evaluate.settings import EvalSettings

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TREE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
CONFIG = (ROOT / "docs/config.md").read_text(encoding="utf-8")
EVALUATION = (ROOT / "docs/evaluation.md").read_text(encoding="utf-8")


def test_references_are_the_generated_ones() -> None:
    for page, model in ((CONFIG, Config), (EVALUATION, EvalSettings)):
        between = page.split("<!-- config reference -->")[1].split("<!-- end")[0]
        assert between.strip() == reference_table(model)


def test_every_package_folder_is_in_the_tree() -> None:
    folders = {path.parent.name for path in (ROOT / "megatron_opsft").glob("*/__init__.py")}
    assert folders == {f for f in folders if re.search(rf"^  {f}/ ", TREE, re.MULTILINE)}


def test_every_top_level_module_is_in_the_tree() -> None:
    modules = {path.name for path in (ROOT / "megatron_opsft").glob("*.py")}
    assert {m for m in modules if not m.startswith("__") and m not in TREE} == set()


def test_every_file_that_a_command_names_exists() -> None:
    named = re.findall(r"(?:bash|python) ((?:examples|tests|tools|benchmarks)/[\w/.]+)", README)
    assert len(named) >= 3
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_example_configs_load() -> None:
    configs = list((ROOT / "examples/configs").glob("*.yaml"))
    assert configs
    for path in configs:
        assert load_config(path).run.steps > 0


def test_example_evaluations_load() -> None:
    configs = list((ROOT / "examples/eval").glob("*.yaml"))
    assert configs
    for path in configs:
        assert load(EvalSettings, path).temperature == 0.6


def test_every_figure_exists() -> None:
    for folder, text, count in ((ROOT, README, 2), (ROOT / "docs", EVALUATION, 1)):
        figures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)
        assert len(figures) >= count
        assert [name for name in figures if not (folder / name).is_file()] == []


def test_readme_is_read_in_one_go() -> None:
    assert len(README.splitlines()) <= 170


def test_the_environment_is_activated_before_the_first_bare_command() -> None:
    commands = "\n".join(re.findall(r"```bash\n(.*?)```", README, re.DOTALL)).splitlines()
    bare = [n for n, line in enumerate(commands) if line.startswith(("megatron-opsft", "torchrun"))]
    assert commands.index(next(c for c in commands if c.startswith("source .venv"))) < bare[0]


def test_every_configuration_in_the_docs_loads(tmp_path: Path) -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("first_run", "data"))]
    blocks = [b for p in pages for b in re.findall(r"```yaml\n(.*?)```", p.read_text(), re.DOTALL)]
    assert len(blocks) >= 3
    for number, block in enumerate(blocks):
        file = tmp_path / f"{number}.yaml"
        file.write_text(block)
        model = [] if "model:" in block else ["model.path=tiny_reasoner"]
        assert load_config(file, model).data.parts
