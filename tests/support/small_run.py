"""The quickstart, made so small that a run of a few steps takes seconds."""

import shutil
from pathlib import Path

from forked_cli import ROOT

from megatron_opsft.models.storage.model_paths import ASSETS, TINY_REASONER

QUICKSTART = str(ROOT / "examples/configs/quickstart.yaml")
# The first problems of the embedded task: to draw all of them takes longer than a step.
FEW_PROBLEMS = [
    f"data.train={ROOT / 'tests/data/train.jsonl'}",
    f"eval.data={ROOT / 'tests/data/test.jsonl'}",
]
SMALL_RUN = [
    *FEW_PROBLEMS,
    "run.eval_every=0",
    "run.device=cpu",
    "run.tensorboard=false",
    "data.prompts_per_step=6",
    "rollout.group_size=4",
    "rollout.batch_size=24",
    "eval.num_problems=4",
    "eval.samples_per_problem=1",
    "eval.max_response_tokens=16",
    "verify.workers=1",
    "verify.judge=own_judges:last_box",
]
FOUR_STEPS = [*SMALL_RUN, "run.steps=4", "checkpoint.every=1"]
THINKING_OFF = "data.template_arguments={enable_thinking: false}"
CLOSED = "<\uff5cAssistant\uff5c><think>\n\n</think>\n\n"


def thinking_model(path: Path) -> Path:
    """The tiny reasoner in the directory `path`, with a chat template whose prompts end with CLOSED
    if thinking is off.
    """
    model = Path(shutil.copytree(ASSETS / TINY_REASONER, path))
    file = model / "chat_template.jinja"
    opened = "{{ '<\uff5cAssistant\uff5c><think>\\n' }}"
    closed = "{%- if enable_thinking is false %}{{ '\\n</think>\\n\\n' }}{%- endif %}"
    text = file.read_text("utf-8")
    assert opened in text
    file.write_text(text.replace(opened, opened + closed), "utf-8")
    return model
