"""Problems as chat messages: `[{"role": "user", "content": "1 + 1?"}]`."""

from collections.abc import Mapping

from megatron_opsft.errors import RowError
from megatron_opsft.records import Message

_ROLES = ("system", "user", "assistant")


def read_messages(value: list[object], field: str) -> tuple[Message, ...]:
    """At least one; the last is the user's, and only the first can be the system's.

    field: what errors call them. Errors: `RowError`.
    """
    messages = [_read(item, f"{field}[{number}]") for number, item in enumerate(value)]
    if not messages:
        raise RowError(f"{field} is an empty list of messages")
    if messages[-1].role != "user":
        raise RowError(f"{field} ends with a message of role {messages[-1].role}, not user")
    if any(message.role == "system" for message in messages[1:]):
        raise RowError(f"{field} has a system message that is not the first")
    return tuple(messages)


def _read(item: object, where: str) -> Message:
    if not isinstance(item, Mapping):
        raise RowError(f"{where} is of type {type(item).__name__}, not a message")
    role, content = item.get("role"), item.get("content")
    if role not in _ROLES:
        raise RowError(f"{where} has role {role!r}; there are {', '.join(_ROLES)}")
    if not isinstance(content, str):
        raise RowError(f"the content of {where} is of type {type(content).__name__}, not text")
    if not content.strip():
        raise RowError(f"the content of {where} is empty")
    return Message(role=role, content=content)
