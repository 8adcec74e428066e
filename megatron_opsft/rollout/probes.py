"""What engine and trainer are compared on after a push."""

from collections.abc import Sequence
from dataclasses import replace

from megatron_opsft.records import Sample

NUM_PROBES = 4
MAX_PROBE_TOKENS = 256  # of a response: enough to see wrong weights, little enough to cost nothing


def pick_probes(
    samples: Sequence[Sample], prompts: Sequence[tuple[int, ...]], max_tokens: int
) -> list[Sample]:
    """A few accepted responses of different problems, shortened; where none was accepted, prompts
    read as if they were responses.

    max_tokens: what the engine takes for prompt and response together; it wants room for one more
    token. Pure: every rank picks the same from the same.
    """
    different = list({sample.problem_id: sample for sample in samples}.values())
    different = different or [
        Sample(problem_id="", sample_index=0, prompt_ids=ids[:1], response_ids=ids[1:])
        for ids in prompts
    ]
    probes = []
    for sample in different[:NUM_PROBES]:
        room = max_tokens - len(sample.prompt_ids) - 1
        response = sample.response_ids[: min(room, MAX_PROBE_TOKENS)]
        if response:
            probes.append(replace(sample, response_ids=response))
    return probes
