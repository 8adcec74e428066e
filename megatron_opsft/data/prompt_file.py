"""A user's own prompt: a Jinja file that makes the user's message of each row."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_opsft.errors import RowError, UserError, first_line, looked_in

if TYPE_CHECKING:
    from jinja2 import Template


@dataclass(frozen=True)
class PromptFile:
    """A Jinja template of `problem`, the text, and `row`, all columns of the row: `row.options`."""

    template: "Template"

    def render(self, problem: str, row: Mapping[str, Any]) -> str:
        """Return the user's message of a row.

        Errors: `RowError` for a column that is missing, and for an empty text.
        """
        try:
            text = self.template.render(problem=problem, row=row)
        except Exception as error:  # the file may compute anything
            raise RowError(f"data.template: {first_line(error)}") from None
        if not text.strip():
            raise RowError("data.template gives an empty prompt")
        return text


def open_prompt_file(
    template: str, *, option: str = "data.template"
) -> PromptFile | None:
    """Open a template that is a file; None for a shipped one.

    option: the config key of the template, for errors.
    Errors: `UserError` for a file that is missing, is not Jinja, or uses neither problem nor row.
    """
    if not template.endswith(".jinja"):
        return None
    # Here, not at the top: the checks before a run need no Jinja.
    from jinja2 import StrictUndefined, TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined)
    where = f"{option}={template}"
    try:
        source = Path(template).read_text(encoding="utf-8-sig")
        prompt_file = PromptFile(environment.from_string(source))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        reason = f"{reason or error}{looked_in(template)}"
        raise UserError(f"{where} cannot be read ({reason})") from None
    except TemplateError as error:
        raise UserError(f"{where} is not a Jinja template: {error}") from None
    if not re.search(r"\b(?:problem|row)\b", source):
        raise UserError(
            f"{where} uses neither problem nor row: write {{{{ problem }}}}"
        )
    return prompt_file
