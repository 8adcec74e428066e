"""The package's calls into Megatron, TransformerEngine, vLLM and torch, checked by mypy against the
sources that a GPU run has. What mypy cannot see:

- vLLM's `Worker.reload_weights`, which hands any argument to either of its model runners;
- a call of a module, which is Megatron's `forward`, and of the schedule, whose type Megatron does
  not say: tests/gloo runs them, with the newest Megatron too (tests/run.sh --python);
- `LLM(**options)` and `TransformerConfig(**options)`: tests/gpu_contract/test_packages.py;
- methods of torch's stores, of which torch's own types lack some: tests/gloo runs them.
"""

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megatron_opsft"
CHECKED = ["trainer/loss", "trainer/model", "runtime", "run/sync", "rollout/vllm"]
CHECKED += ["models/storage/dist_metadata.py", "commands/convert/megatron_layout.py"]
CPU_ONLY = {"cpu_compat.py", "cpu.py"}
BUILD, STEP = "trainer/model/build.py", "trainer/model/step.py"
ENGINE, HEAD = "rollout/vllm/engine.py", "trainer/loss/output_head.py"
# Of a file, what it says, and what it must not be able to say.
PLANTED = [
    (BUILD, "grad_reduce_in_fp32=True", "grad_reduce_in_float32=True"),
    (ENGINE, "prompt_logprobs=0", "prompt_log_probs=0"),
    (ENGINE, "llm_engine.step()", "llm_engine.step(1)"),
    (STEP, "chunk.zero_grad_buffer()", "chunk.zero_grad_buffer(True)"),
    ("trainer/model/optimizer.py", "step_with_ready_grads()", "step_with_gradients()"),
    ("trainer/model/checkpoint_share.py", "member.gbuf_ranges", "member.buffer_ranges"),
    (HEAD, "self.group.rank()", "self.group.ranks()"),
    (ENGINE, "runner.get_draft_model()", "runner.drafter"),  # of the first model runner alone
    (ENGINE, "draft, self._runner.get_model()", "draft, self._runner.model_state"),  # second
    (BUILD, "import parallel_state, ", "import parallel_states, "),
    ("trainer/model/checkpoint_write.py", "data(self, plan: SavePlan, planner: Any)", "data(self)"),
]


def sources() -> Iterator[Path]:
    """The files that a GPU run's packages are called from."""
    for name in CHECKED:
        path = PACKAGE / name
        found = sorted(path.glob("*.py")) if path.is_dir() else [path]
        yield from (file for file in found if file.name not in CPU_ONLY)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mypy")


def errors(cache: Path, *options: str) -> dict[str, tuple[range, str]]:
    """What mypy finds: its line -> the lines of the source, and the file."""
    words = ["--config-file", "tests/gpu_contract/mypy.ini", "--cache-dir", str(cache)]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--show-error-end", *words, *options, *map(str, sources())],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = re.findall(r"^((.+?):(\d+):\d+:(\d+):\d+: error: .*)$", done.stdout, re.MULTILINE)
    assert bool(found) == bool(done.returncode), done.stdout
    return {line: (range(int(a), int(b) + 1), file) for line, file, a, b in found}


def test_every_call_has_the_types_of_the_gpu_packages(cache: Path) -> None:
    assert len(list(sources())) > 40
    assert list(errors(cache)) == []


def test_every_kind_of_wrong_call_is_found(cache: Path, tmp_path: Path) -> None:
    texts: dict[str, str] = {}
    for file, right, wrong in PLANTED:
        text = texts.setdefault(file, (PACKAGE / file).read_text(encoding="utf-8"))
        assert right in text and wrong not in text, (file, right)
        texts[file] = text.replace(right, wrong, 1)
    options = []
    for number, (file, text) in enumerate(texts.items()):
        (tmp_path / f"{number}.py").write_text(text, encoding="utf-8")
        options += ["--shadow-file", str(PACKAGE / file), str(tmp_path / f"{number}.py")]
    found = errors(cache, *options).values()
    for file, _, wrong in PLANTED:
        line = texts[file].partition(wrong)[0].count("\n") + 1
        assert any(line in lines and place.endswith(file) for lines, place in found), (file, wrong)


def test_either_runner_reloads_weights_from_an_iterator() -> None:
    from vllm.v1.worker import gpu_model_runner
    from vllm.v1.worker.gpu import model_runner

    for module in (gpu_model_runner, model_runner):
        inspect.signature(module.GPUModelRunner.reload_weights).bind(
            None, weights_iterator=iter(())
        )
