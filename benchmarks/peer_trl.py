"""GRPO's train phase on given rollouts by TRL's own trainer, with TRL's defaults but for what
`trl_settings` says.

With one update for each batch TRL skips the log-probabilities before the update, which are the
update's own; it computes entropies, and keeps no whole logits.
"""

from typing import Any

from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from update_work import END_ID, PAD_ID, Run, StepClock, Work


class ClockCallback(TrainerCallback):
    """Tells the clock of the trainer's steps."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._clock.begin()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._clock.end()


def trl_settings(work: Work, beta: float) -> dict[str, Any]:
    """What differs from the defaults of TRL's `GRPOConfig`."""
    settings = work.optimizer
    batch = {
        "per_device_train_batch_size": work.rows,
        "gradient_accumulation_steps": len(work.samples) // work.rows,
        "num_generations": work.group_size,
        "max_completion_length": work.response_width,
        "shuffle_dataset": False,
        "max_steps": work.num_steps,
    }
    adamw = {
        "learning_rate": settings.lr,
        "lr_scheduler_type": "constant",
        "weight_decay": settings.weight_decay,
        "adam_beta1": settings.beta1,
        "adam_beta2": settings.beta2,
        "adam_epsilon": settings.eps,
        "max_grad_norm": settings.clip_grad,
    }
    equal = {"beta": beta, "bf16": work.dtype == "bfloat16", "gradient_checkpointing": False}
    model = {"model_init_kwargs": {"dtype": "float32"}, "use_cpu": not work.device.is_cuda}
    quiet = {
        "output_dir": str(work.model_dir.parent / "trl"),
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return {**batch, **adamw, **equal, **model, **quiet}


def build_trl(work: Work, beta: float) -> Run:
    """TRL's trainer, whose rollouts are the given ones and whose reward is their acceptance."""
    words = Tokenizer(WordLevel({"<pad>": PAD_ID, "<end>": END_ID}, unk_token="<pad>"))
    names = {"pad_token": "<pad>", "eos_token": "<end>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **names)
    # Text has no part in this: decoding belongs to the rollouts.
    tokenizer.batch_decode = lambda ids, **kwargs: [""] * len(ids)

    def rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
        return {
            "prompt_ids": [list(sample.prompt_ids) for sample in work.samples],
            "completion_ids": [list(sample.response_ids) for sample in work.samples],
            "logprobs": None,
        }

    def acceptance(prompts: list[str], **kwargs: Any) -> list[float]:
        return [float(flag) for flag in work.accepted]

    clock = StepClock(work)
    numbers = [str(number) for number in range(len(work.samples) // work.group_size)]
    trainer = GRPOTrainer(
        model=str(work.model_dir),
        reward_funcs=acceptance,
        args=GRPOConfig(**trl_settings(work, beta)),
        train_dataset=Dataset.from_dict({"prompt": numbers}),
        processing_class=tokenizer,
        callbacks=[ClockCallback(clock)],
        rollout_func=rollouts,
    )

    def run() -> list[float]:
        trainer.train()
        return clock.seconds

    return run
