"""A whole step of on-policy SFT as one writes it in plain PyTorch and transformers.

`against_peers.py step` times it beside ours on the same problems: `generate` samples the groups,
the judge of this project gives the verdicts in the same process, and one AdamW step learns from the
accepted responses in padded micro-batches, scaled by the longest accepted one.
"""

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from peer_grpo import Updates, pad_batch
from transformers import AutoModelForCausalLM

from megatron_opsft.config import Config
from megatron_opsft.records import Outcome, Sample
from megatron_opsft.runtime.device import Device
from megatron_opsft.verify.math_verifier import judge


class Question(NamedTuple):
    """A problem as a contender gets it."""

    prompt_ids: list[int]
    answer: str


class PlainLoop:
    """Model, optimizer, and the step."""

    def __init__(
        self,
        model_dir: str,
        tokenizer: Any,
        end_token_ids: Sequence[int],
        config: Config,
        device: Device,
    ) -> None:
        self.tokenizer, self.end_token_ids, self.config = tokenizer, list(end_token_ids), config
        self.device = device
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self.model = model.to(device.torch_device)
        self.updates = Updates(self.model, config.optimizer)

    def step(self, questions: Sequence[Question]) -> dict[str, float]:
        """Sample, judge, update; seconds of each, and what was sampled."""
        started = perf_counter()
        samples = list(self._sample(questions))
        sampled = perf_counter()
        accepted = self._accepted(samples, questions)
        judged = perf_counter()
        self._update(accepted)
        self.device.synchronize()
        ended = perf_counter()
        return {
            "rollout_seconds": sampled - started,
            "verify_seconds": judged - sampled,
            "train_seconds": ended - judged,
            "seconds": ended - started,
            "sampled_tokens": sum(len(sample.response_ids) for sample in samples),
            "num_accepted": len(accepted),
        }

    @torch.inference_mode()
    def _sample(self, questions: Sequence[Question]) -> Iterator[Sample]:
        """A group of responses to every question, as many at once as ours decodes at once."""
        rollout = self.config.rollout
        self.model.eval()
        prompts_at_once = max(1, rollout.batch_size // rollout.group_size)
        for start in range(0, len(questions), prompts_at_once):
            part = questions[start : start + prompts_at_once]
            batch = self.tokenizer.pad(
                {"input_ids": [question.prompt_ids for question in part]},
                padding_side="left",
                return_tensors="pt",
            ).to(self.device.torch_device)
            sequences = self.model.generate(
                **batch,
                do_sample=True,
                temperature=rollout.temperature,
                top_p=rollout.top_p,
                top_k=0,
                max_new_tokens=rollout.max_response_tokens,
                num_return_sequences=rollout.group_size,
                eos_token_id=self.end_token_ids,
                pad_token_id=self.tokenizer.pad_token_id,
            )
            responses = sequences[:, batch.input_ids.shape[1] :].tolist()
            for row, ids in enumerate(responses):
                number, index = divmod(row, rollout.group_size)
                yield Sample(
                    problem_id=str(start + number),
                    sample_index=index,
                    prompt_ids=tuple(part[number].prompt_ids),
                    response_ids=self._up_to_the_end(ids),
                )

    def _up_to_the_end(self, ids: list[int]) -> tuple[int, ...]:
        """The tokens up to the first end token, which is kept."""
        for position, token in enumerate(ids):
            if token in self.end_token_ids:
                return tuple(ids[: position + 1])
        return tuple(ids)

    def _accepted(self, samples: Sequence[Sample], questions: Sequence[Question]) -> list[Sample]:
        """The finished samples whose answer is right."""
        finished = [s for s in samples if s.response_ids[-1] in self.end_token_ids]
        texts = self.tokenizer.batch_decode([sample.response_ids[:-1] for sample in finished])
        return [
            sample
            for sample, text in zip(finished, texts, strict=True)
            if judge(text, questions[int(sample.problem_id)].answer).outcome is Outcome.CORRECT
        ]

    def _update(self, samples: Sequence[Sample]) -> None:
        """One AdamW step on the token losses over (samples x longest response)."""
        self.model.train()
        longest = max(len(sample.response_ids) for sample in samples)
        for part in self._microbatches(samples):
            batch = pad_batch(part, torch.ones(len(part)), self.device.torch_device)
            width = batch.response_mask.shape[1]
            logits = self.model(
                batch.ids, batch.mask, use_cache=False, logits_to_keep=width + 1
            ).logits[:, :-1]
            labels = batch.ids[:, -width:].masked_fill(batch.response_mask == 0, -100)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            (loss / (len(samples) * longest)).backward()
        self.updates.apply()

    def _microbatches(self, samples: Sequence[Sample]) -> Iterator[list[Sample]]:
        """Samples of like length together, as many as fit into a micro-batch with their padding."""
        budget = self.config.train.max_tokens_per_microbatch
        part: list[Sample] = []
        for sample in sorted(samples, key=lambda sample: len(sample.response_ids)):
            both = [*part, sample]
            prompt_width = max(len(one.prompt_ids) for one in both)
            response_width = max(len(one.response_ids) for one in both)
            if part and len(both) * (prompt_width + response_width) > budget:
                yield part
                part = []
            part = [*part, sample]
        yield part
