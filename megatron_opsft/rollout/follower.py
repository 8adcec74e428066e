"""A response that is decoded with drafts, and the text that it follows."""

from dataclasses import dataclass, field

from megatron_opsft.rollout.suffix_index import AFTER_WRONG, MATCHED, SuffixIndex

Draft = tuple[int, list[int]]  # its kind, as `DraftLength` has it; what may come next
NO_DRAFT: Draft = (0, [])
_MOST_AGREED = 12
_MISS = 3  # what a token that differs takes away from those that agreed, at most half of them


@dataclass(slots=True, eq=False)
class Follower:
    """text: prompt and response so far.

    source, start: a text that the response follows, and where in it. agreed: how many tokens of the
    two were the same on the way here, less for those that were not; 0: it follows none. missed:
    whether the last one was not.
    """

    text: list[int]
    index: SuffixIndex
    source: list[int] = field(default_factory=list)
    start: int = 0
    agreed: int = 0
    missed: bool = False

    def draft(self, most: int) -> Draft:
        """What may come next: what comes next in the text that was followed so far, a token that
        differed taken for a replaced one, or else what followed more of the same tokens elsewhere.
        """
        if self.start >= len(self.source):
            self.agreed = 0
        if self.agreed < MATCHED[0]:
            place = self.index.find(self.text)
            if place is not None and place[0] > self.agreed:
                self.agreed, self.source, self.start = place
                self.missed = False
        if not self.agreed:
            return NO_DRAFT
        tokens = self.source[self.start : self.start + most]
        if tokens and self.source is self.text:  # it repeats itself so far
            tokens = (tokens * (most // len(tokens) + 1))[:most]
        enough = AFTER_WRONG if self.missed else self.agreed
        kind = next((k for k in MATCHED if k <= enough), AFTER_WRONG)
        return (kind, tokens) if tokens else NO_DRAFT

    def put(self, token: int) -> None:
        """Behind the text, and one token on in the text it follows."""
        self.text.append(token)
        if self.agreed:
            self.missed = self.start >= len(self.source) or self.source[self.start] != token
            if self.missed:
                self.agreed = max(self.agreed - _MISS, self.agreed // 2)
            else:
                self.agreed = min(self.agreed + 1, _MOST_AGREED)
            self.start += 1
