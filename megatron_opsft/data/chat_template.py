"""A model's chat template: messages to the text or the tokens of a prompt.

transformers renders it. This file adds that the date is the same every day, that any error of the
template is one line, and that every argument is one that the template reads.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cache
from itertools import product
from string import ascii_letters

from jinja2 import TemplateError, nodes
from jinja2.visitor import NodeVisitor
from pydantic import JsonValue
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import (
    _compile_jinja_template,
    render_jinja_template,
)

from megatron_opsft.errors import PromptError, UserError, first_line
from megatron_opsft.records import Message, TokenIds

# The day that chat templates take for today: with the real one, a run would have other prompts
# every day. Llama 3.x's templates write this day themselves if they have no clock.
_TODAY = datetime(2024, 7, 26)
# Codes of `strftime`: the C library adds `%-d` (no leading zero). `%s` depends on the time zone.
_DATE_LETTERS = ascii_letters.replace("s", "")
_DATE_CODES = [f"%{flag}{c}" for flag, c in product(("", "-"), _DATE_LETTERS)]
_WORD = "opsft{}word"  # a text that a template has no reason to change


def _frozen_clock() -> str:
    """Return Jinja source that defines `strftime_now`, a template's clock, by replacing each code.

    It is put in front of the template: transformers would write a Python function into the prompt
    as text. A loop, since Jinja compiles a chain of as many filters in 0.3 s.
    """
    values = {code: _TODAY.strftime(code) for code in _DATE_CODES}
    # A code that the C library does not have stays as it is.
    codes = [(code, value) for code, value in values.items() if value != code]
    return (
        "{%- macro strftime_now(format) -%}"
        "{%- set date = namespace(text=format) -%}"
        f"{{%- for code, value in {codes!r} -%}}"
        "{%- set date.text = date.text | replace(code, value) -%}"
        "{%- endfor -%}"
        "{{ date.text }}"
        "{%- endmacro %}\n"  # Jinja removes this new line
    )


_FROZEN_CLOCK = _frozen_clock()
_NAMES_OF_TRANSFORMERS = {
    "messages",
    *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
    *inspect.signature(render_jinja_template).parameters,
}
"""Names that transformers gives a value when it renders a chat template, special tokens aside."""


class ChatTemplate:
    """The chat template of a tokenizer: the one named `default` if it has several.

    arguments: values of names that the template reads, such as Qwen3's `enable_thinking`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        arguments: Mapping[str, JsonValue] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.arguments = dict(arguments or {})
        self._left_out = cache(self._find_left_out)

    def text(self, messages: Sequence[Message], *, ends_open: bool = True) -> str:
        """Return the prompt as text. ends_open: with the head of the response that follows.

        Errors: `PromptError` if anything goes wrong inside the template.
        """
        try:
            text = self.tokenizer.apply_chat_template(
                [message._asdict() for message in messages],
                chat_template=_FROZEN_CLOCK + self.tokenizer.get_chat_template(),
                add_generation_prompt=ends_open,
                tokenize=False,
                **self.arguments,
            )
        except Exception as error:  # Jinja runs whatever the template computes
            reason = first_line(error)
            raise PromptError(
                f"the model's chat template refuses it ({reason})"
            ) from None
        return str(text)

    def tokens(self, messages: Sequence[Message]) -> TokenIds:
        """Return the prompt's token ids, up to where the response begins.

        Errors: `PromptError`; also for a message that the template leaves out.
        """
        if role := self.left_out(message.role for message in messages):
            raise PromptError(f"the model's chat template leaves out {role} messages")
        # The template writes the special tokens itself.
        return tuple(
            self.tokenizer.encode(self.text(messages), add_special_tokens=False)
        )

    def left_out(self, roles: Iterable[str]) -> str | None:
        """Return the first role whose message does not reach the prompt, in a chat of these roles;
        None if all do, and if the template refuses such a chat.
        """
        return self._left_out(tuple(roles))

    def _find_left_out(self, roles: tuple[str, ...]) -> str | None:
        chat = [Message(role, _WORD.format(i)) for i, role in enumerate(roles)]
        try:
            text = self.text(chat)
        except PromptError:
            return None
        for message in chat:
            if message.content not in text:
                return message.role
        return None

    def check(self, *, option: str, system_option: str | None) -> None:
        """Check that prompts hold all messages and open the response, before any row is read.

        option: the config key of the model, for errors. system_option: the key of the system
        message, if one is set. Errors: `UserError` for a template that fails, that leaves out the
        user's or the system message, or that does not open the response.
        """
        user = Message("user", _WORD.format(0))
        where = f"{option}: the chat template of {self.tokenizer.name_or_path}"
        if self.left_out(["user"]):
            raise UserError(
                f"{where} leaves out the user's message, so the model would not see the problem; "
                "put the model's own into chat_template.jinja"
            )
        if system_option and self.left_out(["system", "user"]):
            raise UserError(
                f"{system_option} has no effect: the chat template of "
                f"{self.tokenizer.name_or_path} leaves out system messages; write the text into "
                "the .jinja file of a template instead, or let the chat template print it"
            )
        try:
            prompt = self.text([user])
        except PromptError as error:
            raise UserError(f"{option}: {error}") from None
        if self._is_unopened(user, prompt):
            raise UserError(
                f"{where} has no generation prompt: a prompt ends with "
                f"{prompt.rstrip()[-20:]!r}, and the model would have to write the head of its own "
                "message; add it behind {% if add_generation_prompt %}"
            )

    def check_arguments(self, option: str) -> None:
        """Check that each argument reaches the template, before anything is rendered.

        option: the config key of the arguments, for errors. Errors: `UserError` for a name that
        transformers gives a value, and for one that the template does not read.
        """
        if not self.arguments:
            return
        source = self.tokenizer.get_chat_template()
        try:
            environment = _compile_jinja_template(source).environment
            read = names_read(environment.parse(source))
        except TemplateError:  # the first prompt says what is wrong
            return
        reserved = {*_NAMES_OF_TRANSFORMERS, *environment.globals}
        reserved |= {
            *self.tokenizer.SPECIAL_TOKENS_ATTRIBUTES,
            *self.tokenizer.special_tokens_map,
        }
        reads = ", ".join(sorted(read - reserved)) or "no argument"
        where = f"the chat template of {self.tokenizer.name_or_path}"
        for name in self.arguments:
            if name in reserved:
                raise UserError(
                    f"{option}: {name} has its value from transformers, not from a user; leave it "
                    f"out ({where} reads {reads})"
                )
            if name not in read:
                raise UserError(
                    f"{option}: {name} has no effect: {where} does not read it; it reads {reads}"
                )

    def _is_unopened(self, user: Message, prompt: str) -> bool:
        """True if the head of the assistant's message is missing at the end of a prompt.

        The head is what stands in front of the assistant's text in a whole chat. A template that
        ignores `add_generation_prompt` may still end every prompt with the head, or have none
        (Mistral's `[/INST]`).
        """
        assistant = Message("assistant", _WORD.format(1))
        try:
            whole = self.text([user, assistant], ends_open=False)
            closed = self.text([user], ends_open=False)
        except PromptError:
            return False
        if assistant.content not in whole or closed != prompt:
            return False
        before_text = whole.partition(assistant.content)[0].rstrip()
        shown = prompt.rstrip()
        return before_text != shown and before_text.startswith(shown)


def names_read(template: nodes.Template) -> set[str]:
    """Return the names that some path through a parsed template reads before it sets them: those
    that a caller may hand to it.

    jinja2.meta.find_undeclared_variables also reports names that all paths set before they read
    them, such as `content` in Qwen3's template; a value for one of these would be ignored.
    """
    reader = _Reader()
    reader.visit(template)
    return reader.read


class _Reader(NodeVisitor):
    """Walks through a template in the order in which it is rendered.

    Names that are set inside of a loop or a macro are unknown behind it, as in Jinja.
    """

    def __init__(self) -> None:
        self.read: set[str] = set()
        self._known: set[str] = set()

    def visit_Name(self, node: nodes.Name) -> None:
        if node.ctx != "load":  # it is set, or a parameter
            self._known.add(node.name)
        elif node.name not in self._known:
            self.read.add(node.name)

    def visit_Assign(self, node: nodes.Assign) -> None:
        self.visit(node.node)
        self.visit(node.target)

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> None:
        if node.filter is not None:
            self.visit(node.filter)
        self._visit_inside(node.body)
        self.visit(node.target)

    def visit_If(self, node: nodes.If) -> None:
        branches = [node.body, node.else_]
        self.visit(node.test)
        for branch in node.elif_:
            self.visit(branch.test)
            branches.append(branch.body)
        known_behind = [self._visit_inside(branch) for branch in branches]
        self._known = set.intersection(*known_behind)

    def visit_For(self, node: nodes.For) -> None:
        self.visit(node.iter)
        condition = [] if node.test is None else [node.test]
        loop = nodes.Name("loop", "store")
        self._visit_inside([node.target, loop, *condition, *node.body])
        self._visit_inside(node.else_)

    def visit_Macro(self, node: nodes.Macro) -> None:
        self._known.add(node.name)
        self._visit_callable(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> None:
        self.visit(node.call)
        self._visit_callable(node)

    def visit_FilterBlock(self, node: nodes.FilterBlock) -> None:
        self.visit(node.filter)
        self._visit_inside(node.body)

    def visit_With(self, node: nodes.With) -> None:
        for value in node.values:
            self.visit(value)
        self._visit_inside([*node.targets, *node.body])

    def _visit_callable(self, node: nodes.Macro | nodes.CallBlock) -> None:
        """Visit parameters, defaults and body of a macro, or of the block of a call."""
        own = [nodes.Name(name, "param") for name in ("caller", "varargs", "kwargs")]
        self._visit_inside([*node.args, *own, *node.defaults, *node.body])

    def _visit_inside(self, body: Sequence[nodes.Node]) -> set[str]:
        """Visit nodes one after another; return the names that are known behind them, and forget
        those that they set.
        """
        outside = self._known.copy()
        for node in body:
            self.visit(node)
        known, self._known = self._known, outside
        return known
