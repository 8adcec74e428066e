"""What engine and trainer must agree on before the first token."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from megatron_opsft.data.prompts import end_token_ids, load_tokenizer
from megatron_opsft.errors import UserError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What one side reads. tokenizer_sha256: of the tokenizer's files, names and bytes."""

    tokenizer_sha256: str
    vocab_size: int
    end_token_ids: tuple[int, ...]


def read_identity(model_dir: Path, vocab_size: int) -> Identity:
    """From the files of a model directory. Errors: `UserError` as for loading its tokenizer."""
    digest = hashlib.sha256()
    for name in _TOKENIZER_FILES:
        if (model_dir / name).is_file():
            digest.update(name.encode() + b"\0" + (model_dir / name).read_bytes())
    return Identity(
        tokenizer_sha256=digest.hexdigest(),
        vocab_size=vocab_size,
        end_token_ids=end_token_ids(load_tokenizer(model_dir), model_dir),
    )


def check_agreement(trainer: Identity, engine: Identity) -> None:
    """Errors: `UserError` naming the first difference."""
    for what, ours, theirs in (
        ("tokenizer files (SHA-256)", trainer.tokenizer_sha256, engine.tokenizer_sha256),
        ("vocabulary size", trainer.vocab_size, engine.vocab_size),
        ("end tokens", trainer.end_token_ids, engine.end_token_ids),
    ):
        if ours != theirs:
            raise UserError(
                f"trainer and rollout engine disagree on the {what}: {ours} and {theirs}; "
                "both must read the same model directory"
            )
