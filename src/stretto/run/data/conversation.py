"""Rows of fine-tuning data as conversations, and the part of each that a model is trained on.

A row is `{"messages": [{"role": ..., "content": ...}, ...]}` as OpenAI and TRL have it, with `tools`
where the assistant calls functions; or `{"prompt": ..., "completion": ...}`, both texts or both lists of
messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from stretto.errors import StrettoError, nearest
from stretto.run.data.chat_template import ChatTemplate, Rendered, template_request
from stretto.run.data.row_errors import RowError

ROLES = ("system", "developer", "user", "assistant", "tool")
TrainOn = Literal["assistant", "all"]
_MESSAGES = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages and what of them is trained.

    Attributes:
        where: the row, for messages of errors.
        trained: for each message, whether the model is to write it: those of the assistant, unless `weight`
            is 0 or they belong to the prompt of a row with a completion.
        tools: descriptions of functions.
        arguments: further variables of the template.
    """

    where: str
    messages: Sequence[Mapping[str, Any]]
    trained: Sequence[bool]
    tools: Sequence[Any] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A text to go on from and its continuation, without roles."""

    where: str
    prompt: str
    completion: str


Row = Conversation | Completion


def parse_row(row: Mapping[str, Any], where: str) -> Row:
    """One row of the data.

    Raises:
        StrettoError: neither form; no messages; an unknown role; content that is not text.
    """
    known = {name: value for name, value in row.items() if value is not None}
    if "messages" in known:
        messages = _messages(known["messages"], "messages", where)
        return _conversation(known, where, messages, [True] * len(messages))
    if {"prompt", "completion"} <= known.keys():
        prompt, completion = known["prompt"], known["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            return Completion(where=where, prompt=prompt, completion=completion)
        before, after = (_messages(known[name], name, where) for name in ("prompt", "completion"))
        return _conversation(known, where, [*before, *after], [False] * len(before) + [True] * len(after))
    if "conversations" in known:
        raise StrettoError(
            f"{where}: is in ShareGPT's form (conversations with from and value)",
            hint=f"write each row as {_MESSAGES}",
        )
    columns = ", ".join(list(known)[:8])
    raise StrettoError(
        f"{where}: no field 'messages'" + (f", only {columns}" if columns else ""),
        hint=f'{_MESSAGES}, or {{"prompt": "...", "completion": "..."}}',
    )


def _conversation(
    row: Mapping[str, Any], where: str, messages: list[dict[str, Any]], eligible: Sequence[bool]
) -> Conversation:
    if "functions" in row:
        raise StrettoError(f"{where}: 'functions' is no longer in use", hint="name them as 'tools'")
    tools, arguments = row.get("tools"), row.get("chat_template_kwargs", {})
    if tools is not None and not isinstance(tools, list):
        raise StrettoError(f"{where}: tools is not a list", hint="a list of JSON schemas of functions")
    if not isinstance(arguments, dict):
        raise StrettoError(f"{where}: chat_template_kwargs is not an object", hint='such as {"date": "..."}')
    trained = [
        may and message["role"] == "assistant" and message.pop("weight", 1) != 0
        for may, message in zip(eligible, messages, strict=True)
    ]
    return Conversation(
        where=where,
        messages=messages,
        trained=trained,
        tools=cast("list[Any] | None", tools),
        arguments=cast("dict[str, Any]", arguments),
    )


def _messages(value: object, name: str, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise StrettoError(f"{where}: {name} is not a list", hint=_MESSAGES)
    if not value:
        raise StrettoError(f"{where}: {name} is empty", hint="remove the row")
    return [_message(one, f"{where}, {name}[{i}]") for i, one in enumerate(cast(list[Any], value))]


def _message(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise StrettoError(f"{where}: not an object", hint='{"role": "user", "content": "..."}')
    message = {key: one for key, one in cast(dict[str, Any], value).items() if one is not None}
    role = message.get("role")
    if role not in ROLES:
        near = nearest(str(role), ROLES)
        raise StrettoError(
            f"{where}: role {role!r}" if "role" in message else f"{where}: no role",
            hint=f"did you mean {near}?" if near else f"roles are {', '.join(ROLES)}",
        )
    if "function_call" in message:
        raise StrettoError(
            f"{where}: 'function_call' is no longer in use", hint="write it as one of 'tool_calls'"
        )
    # null is what some templates want of a message that only calls tools, and no text what others want
    null = "content" in value and "content" not in message and message.get("tool_calls")
    message["content"] = None if null else _content(message, where)
    if message.get("weight", 1) not in (0, 1):
        raise StrettoError(f"{where}: weight {message['weight']}", hint="0 (not trained on) or 1")
    return message


def _content(message: Mapping[str, Any], where: str) -> str:
    """The text of a message; one that only calls tools has none."""
    content = message.get("content", "" if message.get("tool_calls") else None)
    if isinstance(content, list):
        parts = cast(list[Any], content)
        kinds = [part.get("type") if isinstance(part, dict) else type(part).__name__ for part in parts]
        if other := next((kind for kind in kinds if kind != "text"), None):
            raise StrettoError(
                f"{where}: content has a part of type {other!r}", hint="only text can be trained on"
            )
        content = "".join(str(part.get("text", "")) for part in parts)
    if not isinstance(content, str):
        said = "no content" if content is None else f"content is a {type(content).__name__}"
        raise StrettoError(f"{where}: {said}", hint="content is a text")
    return content


# ---------------------------------------------------------------------- what is trained on


def complete(row: Completion, train_on: TrainOn, begin: str, end: str) -> Rendered:
    """The text of a row without roles, between `begin` and `end`, and the span that is trained on."""
    text = f"{begin}{row.prompt}{row.completion}{end}"
    start = 0 if train_on == "all" else len(begin) + len(row.prompt)
    return Rendered(text, ((start, len(text)),))


def mark(
    rows: Sequence[Conversation], template: ChatTemplate, train_on: TrainOn
) -> Iterator[list[Rendered] | RowError]:
    """The samples that each conversation makes, with the spans of characters that are trained on; or why it
    makes none: the template fails, or it cannot be told what the assistant writes.

    Raises:
        StrettoError: the template is not valid.
    """
    requests = [
        template_request(
            row.messages,
            tools=row.tools,
            arguments=row.arguments,
            trained=None if train_on == "all" else row.trained,
        )
        for row in rows
    ]
    for row, answer in zip(rows, template.answers(requests), strict=True):
        if isinstance(answer, RowError):
            yield RowError(answer.kind, f"{row.where}: {answer.message}", hint=answer.hint)
        elif train_on == "all":
            yield [Rendered(one.text, ((0, len(one.text)),)) for one in answer]
        else:
            yield answer
