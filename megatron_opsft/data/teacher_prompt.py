"""What a teacher is asked: the problem under another instruction than the plain prompt's."""

from dataclasses import replace

from megatron_opsft.data.prompt_file import open_prompt_file
from megatron_opsft.data.prompts import PromptEncoder
from megatron_opsft.errors import RowError, UserError
from megatron_opsft.records import Problem

_OPTION = "method.teacher_template"


class TeacherPrompt:
    """Like `PromptEncoder`, of a template that replaces the plain one's.

    Errors: `UserError` for a file that cannot be read or needs a row's columns, and where the plain
    template is a file, whose instruction cannot be told from the problem any more.
    """

    def __init__(self, encoder: PromptEncoder, template: str) -> None:
        if encoder.template.endswith(".jinja"):
            raise UserError(
                f"data.template={encoder.template}: {_OPTION} replaces the instruction of a "
                "shipped template; set data.template to one of them, such as r1"
            )
        self._encoder = replace(encoder, template=template)
        self._file = open_prompt_file(template, option=_OPTION)
        if self._file is not None:
            try:
                self._file.render("1", {})
            except RowError as error:
                raise UserError(
                    f"{_OPTION}={template} must do with `problem` alone: {error}"
                ) from None

    @property
    def example(self) -> str:
        """The prompt of a problem `1`, as text."""
        prompt = self.encode(Problem(id="", text="1", answer=""))
        return str(self._encoder.tokenizer.decode(prompt))

    def encode(self, problem: Problem) -> tuple[int, ...]:
        """Prompt token ids up to where the response begins."""
        if self._file is not None:
            problem = replace(problem, text=self._file.render(problem.text, {}))
        return self._encoder.encode(problem)
