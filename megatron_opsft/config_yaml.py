"""YAML as people write it: PyYAML's, without the readings that silently change a value.

To YAML 1.1 `010` is 8, `1:30` is 90 and `2024-01-01` is a date, and of two equal keys the first is
lost. Here the first three are text, which a number's key takes as digits or refuses, and equal
keys are an error. What PyYAML writes is read back as it was.
"""

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

_ASSETS = Path(__file__).parent / "assets"


def find_yaml(path: Path) -> Path:
    """The file itself; for one below `examples/` that is not there, the one that is shipped."""
    shipped = _ASSETS / path
    is_example = path.parts[:1] == ("examples",) and ".." not in path.parts
    return shipped if is_example and not path.exists() and shipped.is_file() else path


def parse_yaml(text: str) -> Any:
    """The value of a YAML document; None of an empty one. Errors: `ValueError`, one line."""
    return _load(text)[0]


def parse_yaml_value(text: str) -> Any:
    """The same of text that has no comments: what a shell was given behind `key=`."""
    value, end = _load(text)
    if text[end:].strip():
        raise ValueError(
            f"YAML takes {text[end:].strip()!r} for a comment; put the value in quotes"
        )
    return value


def _load(text: str) -> tuple[Any, int]:
    """The value, and how many characters of the text it takes."""
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None, 0
            return loader.construct_document(node), node.end_mark.index
        finally:
            loader.dispose()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except (ValueError, KeyError, AttributeError):  # as PyYAML ends at `!!int x`, `!!bool x`
        raise ValueError("a value has too many digits, or does not fit its !!tag") from None


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := [key for n, key in enumerate(names) if key in names[:n] and key != "<<"]:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {twice[0]} is there twice", node.start_mark
            )
        return super().construct_mapping(node, deep)


# Each rule is part of YAML 1.1's for the same tag: then a dumper of YAML 1.1 puts in quotes
# whatever would not be read as text here.
_REPLACED = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp")
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)$")
_FLOAT = re.compile(
    r"""[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+][0-9]+)?$
       |\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?$
       |[-+]?\.(?:inf|Inf|INF)$
       |\.(?:nan|NaN|NAN)$""",
    re.VERBOSE,
)
_Loader.yaml_implicit_resolvers = {
    first: [rule for rule in rules if rule[0] not in _REPLACED]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
