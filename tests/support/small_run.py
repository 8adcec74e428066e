"""The quickstart, made so small that a run of a few steps takes seconds."""

from forked_cli import ROOT

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
