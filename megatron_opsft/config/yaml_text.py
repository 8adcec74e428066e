"""YAML 1.2, read and written by ruamel.yaml: `010` is 10, and `1:30`, `off` and dates are text."""

import io
import re
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError, SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.representer import SafeRepresenter

_ASSETS = Path(__file__).parents[1] / "assets"


class _Constructor(SafeConstructor):
    """Reads dates, a lone `=` and a lone `<<` as text: no key of ours holds a date, but a path or
    a name may look like one.
    """


for _tag in ("timestamp", "value", "merge"):
    _Constructor.add_constructor(
        f"tag:yaml.org,2002:{_tag}",
        lambda constructor, node: constructor.construct_scalar(node),
    )


class _Representer(SafeRepresenter):
    """Writes numbers so that readers of YAML 1.1 and 1.2 agree about them."""

    def represent_float(self, data: float) -> Any:
        """Write 1e-05 as 1.0e-05: YAML 1.1 takes 1e-05 for text."""
        text = repr(data)
        if "." not in text:
            text = text.replace("e", ".0e")
        return self.represent_scalar("tag:yaml.org,2002:float", text)


_Representer.add_representer(float, _Representer.represent_float)


def find_yaml(path: Path) -> Path:
    """Return the path, or the shipped copy of a path below `examples/` that does not exist."""
    is_example = path.parts[:1] == ("examples",) and ".." not in path.parts
    if is_example and not path.exists() and (_ASSETS / path).is_file():
        return _ASSETS / path
    return path


def parse_yaml(text: str) -> Any:
    """Read a YAML document; an empty one is None. Errors: `ValueError`, one line with the place."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor = _Constructor
    try:
        return yaml.load(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except DuplicateKeyError as error:
        key = str(error.problem).split('"')[1]
        raise ValueError(f"{_place(error)}the key {key} is there twice") from None
    except MarkedYAMLError as error:
        reason = error.problem or error.context
        if error.problem and error.context and error.context_mark:
            reason += (
                f" ({error.context} that begins in line {error.context_mark.line + 1})"
            )
        raise ValueError(f"{_place(error)}{reason}") from None
    except YAMLError as error:
        raise ValueError(str(error).split("\n")[0]) from None
    except (ValueError, KeyError, AttributeError, TypeError):
        # Such as `!!int x` and `{? [1] : 2}`.
        raise ValueError(
            "a value has too many digits, or does not fit its !!tag"
        ) from None


def _place(error: MarkedYAMLError) -> str:
    """Return the beginning of an error's text: its line and column, counted from 1."""
    mark = error.problem_mark or error.context_mark
    return "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "


def parse_yaml_value(text: str) -> Any:
    """Read the text of `key=text` on a command line.

    Errors: `ValueError`, also for a comment: the rest of the text would be lost.
    """
    if (comment := re.search(r"(?:^|\s)(#.*)", text)) and text[0] not in "\"'":
        raise ValueError(
            f"YAML takes {comment[1]!r} for a comment; put the value in quotes"
        )
    return parse_yaml(text)


def dump_yaml(tree: Any) -> str:
    """Write a document that `parse_yaml` reads back unchanged; mappings keep their order."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Representer = _Representer
    yaml.default_flow_style = False
    yaml.representer.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    text = io.StringIO()
    yaml.dump(tree, text)
    return text.getvalue()
