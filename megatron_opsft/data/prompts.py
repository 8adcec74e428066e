"""Prompts: problems made into token ids by the model's own chat template; the tokenizer for that.

The instructions are the paper's (appendix, prompt templates). Everything around them, special
tokens and an opening `<think>` included, comes from the tokenizer's chat template.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from pydantic import JsonValue
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from megatron_opsft.data.chat_template import ChatTemplate
from megatron_opsft.data.chatml import chatml_end, chatml_of
from megatron_opsft.data.prompt_file import PromptFile, open_prompt_file
from megatron_opsft.errors import PromptError, RowError, UserError, first_line
from megatron_opsft.models.architectures.config_from_hf import (
    language_model_of,
    read_json,
)
from megatron_opsft.records import THINK, Message, Problem, TokenIds
from megatron_opsft.section import ChatTemplateName

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
MODEL_OPTION = "model.path"  # the config key of a run's model, for errors
_EXAMPLE = Problem(id="", text="1", answer="")


@dataclass(frozen=True, kw_only=True)
class PromptEncoder:
    """An encoder of problems as prompts of one model."""

    tokenizer: PreTrainedTokenizerBase
    template: str
    """r1 (step by step), cod (draft) or concise (key steps alone); any other adds nothing to a
    problem's text."""
    system_prompt: str = ""
    """The system message of problems that have none."""
    template_arguments: Mapping[str, JsonValue] | None = None
    """What the chat template is given besides the messages."""
    prompt_file: PromptFile | None = None
    """A teacher's file, which makes the user's message from the problem's text."""

    @cached_property
    def _markers(self) -> re.Pattern[str] | None:
        """A pattern of the texts that become special tokens, or other tokens in angle brackets."""
        markers = []
        for token in self.tokenizer.added_tokens_decoder.values():
            text = token.content
            if text.strip() and (token.special or re.fullmatch("<.*>", text)):
                markers.append(text)
        if not markers:
            return None
        markers.sort(key=len, reverse=True)  # a marker may begin with another
        return re.compile("|".join(map(re.escape, markers)))

    @cached_property
    def chat(self) -> ChatTemplate:
        """The model's chat template."""
        return ChatTemplate(self.tokenizer, self.template_arguments)

    def check(self, *, option: str, section: str) -> None:
        """Check that the chat template takes what the keys of the prompt give it, before any row is
        read.

        option: the config key of the model; section: what stands before the keys of the prompt,
        "data." in a run; both for errors. Errors: those of `ChatTemplate.check_arguments` and
        `ChatTemplate.check`.
        """
        self.chat.check_arguments(f"{section}template_arguments")
        system_option = f"{section}system_prompt" if self.system_prompt else None
        self.chat.check(option=option, system_option=system_option)

    @property
    def opens_think(self) -> bool:
        """True if prompts end with `<think>`, so that a response begins inside it."""
        return self.example.rstrip().endswith(THINK)

    @property
    def example(self) -> str:
        """The prompt of a problem whose text is "1", as the chat template writes it. It shows what
        the template adds, such as an opened `<think>`.
        """
        return self.chat.text(self.messages(_EXAMPLE))

    def encode(
        self, problem: Problem, *, system: str = "", suffix: str = ""
    ) -> TokenIds:
        """Return the prompt's token ids, up to where the response begins.

        system: added to the end of the system message; suffix: to the end of the user's. An
        R1-style chat template opens `<think>`; nothing is added to one that does not. Errors:
        `PromptError` for a text with a marker such as `<|im_end|>`, which as a token would end the
        user's message or the thinking, and if the chat template refuses the chat.
        """
        texts = [*(message.content for message in problem.before), problem.text]
        markers = self._markers
        for text in texts:
            if markers and (marker := markers.search(text)):
                raise PromptError(
                    f"the problem contains {marker[0]!r}, a special token of the model"
                )
        return self.chat.tokens(self.messages(problem, system=system, suffix=suffix))

    def messages(
        self, problem: Problem, *, system: str = "", suffix: str = ""
    ) -> list[Message]:
        """Return the chat that the model is to answer; see `encode`."""
        chat = list(problem.before)
        system_prompt = self.system_prompt
        if chat and chat[0].role == "system":
            system_prompt = chat.pop(0).content
        if system_text := "\n\n".join(filter(None, [system_prompt, system])):
            chat.insert(0, Message(role="system", content=system_text))
        text = problem.text
        if self.prompt_file:
            text = self.prompt_file.render(text, {})
        content = text + _INSTRUCTIONS.get(self.template, "") + suffix
        return [*chat, Message(role="user", content=content)]


def teacher_of(encoder: PromptEncoder, template: str) -> PromptEncoder:
    """Return the encoder of a teacher's prompts: its template replaces the plain one.

    Errors: `UserError` for a file that cannot be read or needs a row's columns, and if the plain
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
    path: str | Path,
    *,
    option: str = MODEL_OPTION,
    chat_template: ChatTemplateName | None = None,
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model directory from its `tokenizer.json`; without that file,
    transformers makes one of SentencePiece's tokenizer.model.

    AutoTokenizer is the second choice: for some model types it builds another class than
    tokenizer.json describes, which drops tokens or splits text differently. option: the config key
    of the model, for errors. chat_template: the name of a shipped one, for a model that has none.
    Errors: `UserError` for missing or damaged files, for a missing chat template, and for a name
    beside another template of the model's own.
    """
    directory = Path(path)
    has_json = (directory / "tokenizer.json").is_file()
    if not has_json and not (directory / "tokenizer.model").is_file():
        raise UserError(
            f"{option}: {path} has no tokenizer.json; copy the tokenizer files "
            "(tokenizer.json, tokenizer_config.json, chat_template.jinja) of the model into it"
        )
    tokenizer_class = PreTrainedTokenizerFast if has_json else AutoTokenizer
    try:
        tokenizer = tokenizer_class.from_pretrained(str(path), trust_remote_code=False)
    except Exception as error:  # the library of tokenizer.json raises bare Exception
        reason = first_line(error)
        raise UserError(
            f"{option}: cannot load a tokenizer from {path}: {reason}"
        ) from error
    key = "data.chat_template" if option == MODEL_OPTION else "chat_template"
    if chat_template is not None:
        shipped = chatml_of(tokenizer, key)
        if tokenizer.chat_template not in (None, shipped):
            raise UserError(
                f"{key}={chat_template} is for a model without a chat template, and {path} has its "
                f"own; leave it out ({key}=)"
            )
        tokenizer.chat_template = shipped
    if not tokenizer.chat_template:
        raise UserError(
            f"{option}: the tokenizer of {path} has no chat template; add chat_template.jinja "
            "(or the chat_template of tokenizer_config.json) of the model; for a base model set "
            f"{key}=chatml"
        )
    try:
        tokenizer.get_chat_template()
    except ValueError:  # tokenizer_config.json may hold several with names
        names = ", ".join(tokenizer.chat_template)
        raise UserError(
            f"{option}: the tokenizer of {path} has chat templates for {names}, and none called "
            "default; save the one to train with as chat_template.jinja beside it"
        ) from None
    # Lengths are checked against the model, with errors that name the config keys.
    tokenizer.deprecation_warnings[
        "sequence-length-is-longer-than-the-specified-maximum"
    ] = True
    return tokenizer


def end_token_ids(
    tokenizer: PreTrainedTokenizerBase,
    model_dir: str | Path,
    *,
    option: str = MODEL_OPTION,
) -> TokenIds:
    """Return all ids that end a response, ascending: those of generation_config.json, config.json
    (and its language model's part), the tokenizer and `chatml_end` together.

    Chat models often have several (`<|im_end|>` and `<|endoftext|>`). Errors: `UserError` if there
    is none.
    """
    values = [tokenizer.eos_token_id, chatml_end(tokenizer)]
    for name in ("generation_config.json", "config.json"):
        file = Path(model_dir) / name
        if file.is_file():
            config = read_json(file)
            # A language model inside a larger one may have its own.
            for part in (config, language_model_of(config)):
                value = part.get("eos_token_id")
                values += value if isinstance(value, list) else [value]
    # -1 stands for none in some configurations.
    end_tokens = {value for value in values if isinstance(value, int) and value >= 0}
    if not end_tokens:
        raise UserError(
            f"{option}: {model_dir} has no end token; set eos_token_id in generation_config.json"
        )
    return tuple(sorted(end_tokens))


def check_vocabulary(
    tokenizer: PreTrainedTokenizerBase,
    end_tokens: Iterable[int],
    vocab_size: int,
    model_dir: str | Path,
    *,
    option: str = MODEL_OPTION,
) -> None:
    """Check that the tokenizer can be this model's: files may be mixed from two models.

    vocab_size: the rows of the model's embedding. More rows than tokens are common; fewer are an
    error, except for a padding token that somebody has added: nothing here pads with it.
    Errors: `UserError`.
    """
    tokens = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    highest = max(tokens)
    beyond = {token_id for token_id in tokens if token_id >= vocab_size}
    beyond.discard(tokenizer.pad_token_id)
    if beyond:
        first = min(beyond)
        raise UserError(
            f"{option}: the tokenizer of {model_dir} has token ids up to {highest}, the first too "
            f"high {first} ({tokens[first]!r}), but the model's vocabulary ends at "
            f"{vocab_size - 1}: the files come from two models; take the tokenizer files of the "
            "model itself"
        )
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    for token_id in end_tokens:
        if token_id not in special:
            description = "not a token"
            if token_id in tokens:
                description = f"{tokens[token_id]!r}, an ordinary token,"
            raise UserError(
                f"{option}: {model_dir} ends responses with token {token_id}, which is "
                f"{description} in its tokenizer: the files come from two models, or "
                "eos_token_id in config.json or generation_config.json is wrong"
            )
