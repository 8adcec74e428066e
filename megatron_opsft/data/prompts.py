"""Problem text -> prompt token ids, through the model's own chat template; tokenizers and end
tokens.

The instructions are the paper's (appendix, prompt templates). Everything around them, special
tokens and an opening `<think>` included, comes from the tokenizer's chat template.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from megatron_opsft.data.chat_template import ChatTemplate
from megatron_opsft.data.prompt_file import PromptFile, open_prompt_file
from megatron_opsft.errors import PromptError, RowError, UserError, first_line
from megatron_opsft.models.architectures.config_from_hf import read_json
from megatron_opsft.records import Message, Problem

_TEACHER_OPTION = "method.teacher_template"
_FINAL = "put your final answer within \\boxed{}."
_INSTRUCTIONS: dict[str, str] = {
    "r1": f"\nPlease reason step by step, and {_FINAL}",
    "concise": (
        "\nSolve it concisely and correctly. Be direct: no elaboration, no redundant steps, no "
        f"restating of the problem. Give only the key steps, and {_FINAL}"
    ),
    "cod": (
        "\nPlease reason step by step, but only keep a minimum draft for each thinking step, "
        f"with 5 words at most, and {_FINAL}"
    ),
}
MODEL_OPTION = "model.path"  # what errors call the model of a run
_EXAMPLE = Problem(id="", text="1", answer="")


@dataclass(frozen=True, kw_only=True)
class PromptEncoder:
    """Problems to prompts of one model.

    template: r1 (step by step), cod (draft), concise (key steps alone); any other adds nothing to a
    problem's text.
    system_prompt: the system message of problems that have none.
    prompt_file: a teacher's, which makes the user's message from the problem's text.
    """

    tokenizer: PreTrainedTokenizerBase
    template: str
    system_prompt: str = ""
    prompt_file: PromptFile | None = None

    @cached_property
    def _markers(self) -> re.Pattern[str] | None:
        """What in a text becomes a special token, or another token in angle brackets."""
        texts = [
            token.content
            for token in self.tokenizer.added_tokens_decoder.values()
            if token.content.strip()
            and (token.special or re.fullmatch("<.*>", token.content))
        ]
        return (
            re.compile("|".join(map(re.escape, sorted(texts, key=len)[::-1])))
            if texts
            else None
        )

    @cached_property
    def chat(self) -> ChatTemplate:
        """The model's chat template."""
        return ChatTemplate(self.tokenizer)

    @property
    def opens_think(self) -> bool:
        """Whether prompts end with `<think>`, so that a response begins inside it."""
        return self.example.rstrip().endswith("<think>")

    @property
    def example(self) -> str:
        """The prompt of a problem `1`, as text."""
        return self.chat.text(self.messages(_EXAMPLE))

    def encode(
        self, problem: Problem, *, system: str = "", suffix: str = ""
    ) -> tuple[int, ...]:
        """Prompt token ids up to where the response begins.

        system: added to the end of the system message; suffix: to the end of the user's. An
        R1-style chat template opens `<think>`; nothing is added to one that does not. Errors:
        `PromptError` for a text with a marker such as `<|im_end|>`, which as a token would end the
        user's message or the thinking, and for what the chat template refuses.
        """
        for text in (*(message.content for message in problem.before), problem.text):
            if self._markers and (found := self._markers.search(text)):
                raise PromptError(
                    f"the problem contains {found[0]!r}, a special token of the model"
                )
        return self.chat.tokens(self.messages(problem, system=system, suffix=suffix))

    def messages(
        self, problem: Problem, *, system: str = "", suffix: str = ""
    ) -> list[Message]:
        """The chat that the model is to answer; see `encode`."""
        before, told = list(problem.before), [self.system_prompt]
        if before and before[0].role == "system":
            told = [before.pop(0).content]
        told = [text for text in (*told, system) if text]
        text = (
            self.prompt_file.render(problem.text, {})
            if self.prompt_file
            else problem.text
        )
        content = text + _INSTRUCTIONS.get(self.template, "") + suffix
        first = [Message(role="system", content="\n\n".join(told))] if told else []
        return [*first, *before, Message(role="user", content=content)]


def teacher_of(encoder: PromptEncoder, template: str) -> PromptEncoder:
    """The encoder of a teacher's prompts: its template replaces the plain one.

    Errors: `UserError` for a file that cannot be read or needs a row's columns, and where the plain
    template is a file, whose instruction cannot be separated from the problem.
    """
    if encoder.template.endswith(".jinja"):
        raise UserError(
            f"data.template={encoder.template}: {_TEACHER_OPTION} replaces the instruction of "
            "a shipped template; set data.template to one of them, such as r1"
        )
    file = open_prompt_file(template, option=_TEACHER_OPTION)
    teacher = replace(encoder, template=template, prompt_file=file)
    try:
        teacher.encode(_EXAMPLE)
    except RowError as error:
        raise UserError(
            f"{_TEACHER_OPTION}={template} must do with `problem` alone: {error}"
        ) from None
    return teacher


def load_tokenizer(
    path: str | Path, *, option: str = MODEL_OPTION
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory: what its `tokenizer.json` says, or without one what
    transformers makes of SentencePiece's tokenizer.model.

    For some model types AutoTokenizer builds another class than tokenizer.json describes, which
    drops tokens or splits text differently. option: what errors call the model. Errors:
    `UserError` for missing or damaged files, and for a missing chat template.
    """
    directory = Path(path)
    is_described = (directory / "tokenizer.json").is_file()
    if not is_described and not (directory / "tokenizer.model").is_file():
        raise UserError(
            f"{option}: {path} has no tokenizer.json; copy the tokenizer files "
            "(tokenizer.json, tokenizer_config.json, chat_template.jinja) of the model into it"
        )
    kind = PreTrainedTokenizerFast if is_described else AutoTokenizer
    try:
        tokenizer = kind.from_pretrained(str(path), trust_remote_code=False)
    except Exception as error:  # the library of tokenizer.json raises bare Exception
        reason = first_line(error)
        raise UserError(
            f"{option}: cannot load a tokenizer from {path}: {reason}"
        ) from error
    if not tokenizer.chat_template:
        raise UserError(
            f"{option}: the tokenizer of {path} has no chat template; add chat_template.jinja "
            "(or the chat_template of tokenizer_config.json) of the model"
        )
    try:
        tokenizer.get_chat_template()
    except ValueError:  # several with names, as tokenizer_config.json may hold them
        names = ", ".join(tokenizer.chat_template)
        raise UserError(
            f"{option}: the tokenizer of {path} has chat templates for {names}, and none called "
            "default; save the one to train with as chat_template.jinja beside it"
        ) from None
    # Lengths are checked against the model, and said in the user's terms.
    tokenizer.deprecation_warnings[
        "sequence-length-is-longer-than-the-specified-maximum"
    ] = True
    return tokenizer


def end_token_ids(
    tokenizer: PreTrainedTokenizerBase,
    model_dir: str | Path,
    *,
    option: str = MODEL_OPTION,
) -> tuple[int, ...]:
    """All ids that end a response, ascending: generation_config.json, config.json and the
    tokenizer together.

    Chat models often have several (`<|im_end|>` and `<|endoftext|>`). UserError when there is none.
    """
    found = {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
    for name in ("generation_config.json", "config.json"):
        file = Path(model_dir) / name
        if file.is_file():
            value = read_json(file).get("eos_token_id")
            values = value if isinstance(value, list) else [value]
            # -1 stands for none in some configurations.
            found.update(each for each in values if isinstance(each, int) and each >= 0)
    if not found:
        raise UserError(
            f"{option}: {model_dir} has no end token; set eos_token_id in generation_config.json"
        )
    return tuple(sorted(found))


def check_vocabulary(
    tokenizer: PreTrainedTokenizerBase,
    end_tokens: Iterable[int],
    vocab_size: int,
    model_dir: str | Path,
    *,
    option: str = MODEL_OPTION,
) -> None:
    """UserError where the tokenizer cannot be this model's, as with files mixed from two models.

    vocab_size: of the model; rows beyond the tokenizer's tokens are common, missing rows are not,
    but for a padding token that somebody has added: nothing here pads with it.
    """
    vocabulary = tokenizer.get_vocab()
    highest = max(vocabulary.values())
    beyond = {
        token_id: token
        for token, token_id in vocabulary.items()
        if token_id >= vocab_size
    }
    beyond.pop(tokenizer.pad_token_id, None)
    if beyond:
        first = min(beyond)
        raise UserError(
            f"{option}: the tokenizer of {model_dir} has token ids up to {highest}, the first too "
            f"high {first} ({beyond[first]!r}), but the model's vocabulary ends at "
            f"{vocab_size - 1}: the files come from two models; take the tokenizer files of the "
            "model itself"
        )
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    for token_id in end_tokens:
        if token_id not in special:
            what = (
                tokenizer.convert_ids_to_tokens(token_id)
                if token_id <= highest
                else None
            )
            raise UserError(
                f"{option}: {model_dir} ends responses with token {token_id}, which is "
                f"{'not a token' if what is None else f'{what!r}, an ordinary token,'} in its "
                "tokenizer: the files come from two models, or eos_token_id in config.json or "
                "generation_config.json is wrong"
            )
