"""README, CONTRIBUTING and docs/: no dead link, and no command that the program no longer has."""

import re
from pathlib import Path

import pytest
from commands import calls_in, command_of

from megatron_opsft.command_line import Program
from megatron_opsft.config.reference import reference_table

ROOT = Path(__file__).parents[2]
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
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        linked = (page.parent / file) if file else page
        assert linked.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors_of(linked), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    for name in FILES.findall(page.read_text(encoding="utf-8")):
        assert list(ROOT.glob(name)), f"{page.name}: {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_their_options_exist(page: Path) -> None:
    for words in commands_of(page.read_text(encoding="utf-8")):
        command, rest = command_of(words)
        assert command.name != "megatron-opsft", f"{page.name}: no command {words}"
        known = {name for parameter in command.params for name in parameter.opts} | {"--help"}
        if isinstance(command, Program) and command.keys_of is not None:
            keys = re.findall(r"^\| `([\w.]+)`", reference_table(command.keys_of), re.MULTILINE)
            known |= {f"--{key.replace('_', '-')}" for key in keys}
        for word in rest:
            if word.startswith("--"):
                option = word.split("=")[0]
                assert option in known, f"{page.name}: {' '.join(words)} has no {option}"


def test_commands_are_found() -> None:
    text = (
        "```bash\nmegatron-opsft train x.yaml \\\n  --resume # why\n```\n`megatron-opsft eval --no`"
    )
    assert commands_of(text) == [["train", "x.yaml", "--resume"], ["eval", "--no"]]
    assert sum(len(commands_of(page.read_text(encoding="utf-8"))) for page in PAGES) > 15
