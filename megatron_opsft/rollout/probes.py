"""What engine and trainer are compared on after a push."""

from collections.abc import Sequence
from dataclasses import replace

from megatron_opsft.records import Response, Sample

NUM_PROBES = 4
MAX_PROBE_TOKENS = 256  # of a response: enough to see wrong weights, little enough to cost nothing


def pick_probes(accepted: Sequence[Response]) -> list[Response]:
    """A few accepted responses of different problems. Pure: every rank picks the same."""
    return list({response.problem_index: response for response in accepted}.values())[:NUM_PROBES]


def as_response(prompt_ids: tuple[int, ...]) -> Sample:
    """A prompt read as if all but its first token were a response."""
    return Sample(
        problem_id="", sample_index=0, prompt_ids=prompt_ids[:1], response_ids=prompt_ids[1:]
    )


def shorten(sample: Sample, max_tokens: int) -> Sample:
    """The sample with as much of its response as is worth scoring; that may be nothing.

    max_tokens: what the engine takes for prompt and response together; it wants room for one more
    token.
    """
    room = max(0, max_tokens - len(sample.prompt_ids) - 1)
    return replace(sample, response_ids=sample.response_ids[: min(room, MAX_PROBE_TOKENS)])
