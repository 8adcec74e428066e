"""A response that is decoded with drafts, and the text that it follows."""

from dataclasses import dataclass, field

from megatron_opsft.rollout.suffix_index import AFTER_WRONG, MATCHED, SuffixIndex

Draft = tuple[int, list[int]]  # its kind, as `DraftLength` has it; what may come next
NO_DRAFT: Draft = (0, [])
_MAX_WRONG = 4  # such tokens in a row that differ from a text end its being followed


@dataclass(slots=True, eq=False)
class Follower:
    """text: prompt and response so far.

    source, start: a text that the response follows, and where in it; wrong: how many of the last
    tokens, one behind the other, were not its.
    """

    text: list[int]
    index: SuffixIndex
    source: list[int] = field(default_factory=list)
    start: int = 0
    wrong: int = 0

    def draft(self, most: int) -> Draft:
        """What may come next: what followed the same tokens elsewhere, or else what comes next in
        the text that was followed so far, as if one token had replaced another.
        """
        place = self.index.find(self.text)
        follows = self.source and self.wrong < _MAX_WRONG
        if place is not None and not (follows and place[0] == MATCHED[-1]):
            kind, self.source, self.start = place
            self.wrong = 0
        elif follows:
            kind = AFTER_WRONG if self.wrong else MATCHED[-1]
        else:
            return NO_DRAFT
        tokens = self.source[self.start : self.start + most]
        if tokens and self.source is self.text and not self.wrong:  # it repeats itself so far
            tokens = (tokens * (most // len(tokens) + 1))[:most]
        return (kind, tokens) if tokens else NO_DRAFT

    def put(self, token: int) -> None:
        """Behind the text, and one token on in the text it follows."""
        self.text.append(token)
        if self.source:
            same = self.start < len(self.source) and self.source[self.start] == token
            self.wrong = 0 if same else self.wrong + 1
            self.start += 1
