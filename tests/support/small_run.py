"""The quickstart, made so small that a run of a few steps takes seconds."""

from forked_cli import ROOT

QUICKSTART = str(ROOT / "examples/configs/quickstart.yaml")
SMALL_RUN = [
    "run.eval_every=0",
    "run.device=cpu",
    "run.tensorboard=false",
    "data.prompts_per_step=6",
    "rollout.group_size=4",
    "rollout.batch_size=8",
    "eval.num_problems=4",
    "eval.samples_per_problem=1",
    "eval.max_response_tokens=64",
    "verify.workers=1",
]
