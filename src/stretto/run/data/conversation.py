"""Rows of fine-tuning data as conversations, and the part of each that a model is trained on.

A row is `{"messages": [{"role": ..., "content": ...}, ...]}` as OpenAI and TRL have it, with `tools`
where the assistant calls functions; or `{"prompt": ..., "completion": ...}`, both texts or both lists of
messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, cast

from stretto.errors import StrettoError, nearest
from stretto.run.data.chat_template import ChatTemplate, Rendered

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
    message["content"] = _content(message, where)
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


def mark(row: Conversation, template: ChatTemplate, train_on: TrainOn) -> Rendered:
    """The text of a conversation and the spans of characters that are trained on.

    Raises:
        StrettoError: the template fails, or does not tell what the assistant writes.
    """
    try:
        whole = template.render(row.messages, tools=row.tools, arguments=row.arguments)
        if train_on == "all":
            return Rendered(whole.text, ((0, len(whole.text)),))
        return _by_blocks(row, whole) if template.marks else _by_prefixes(row, whole, template)
    except StrettoError as error:
        raise StrettoError(f"{row.where}: {error.message}", hint=error.hint) from None


def _by_blocks(row: Conversation, whole: Rendered) -> Rendered:
    """By the template's `{% generation %}` blocks."""
    written = [
        trained
        for message, trained in zip(row.messages, row.trained, strict=True)
        if message["role"] == "assistant"
    ]
    if all(written):
        return whole
    if len(whole.spans) != len(written):
        raise StrettoError(
            f"{len(written)} assistant messages, not all of them trained on, but the template marks"
            f" {len(whole.spans)} blocks",
            hint="give all of the assistant's messages weight 1, or use a template with a block for each",
        )
    return Rendered(whole.text, tuple(s for s, keep in zip(whole.spans, written, strict=True) if keep))


def _by_prefixes(row: Conversation, whole: Rendered, template: ChatTemplate) -> Rendered:
    """By rendering the messages up to each one that is trained on.

    What a message adds to the text, after the words that a template opens the assistant's turn with, is what
    the model is to write.
    """
    spans = list[tuple[int, int]]()
    for i, trained in enumerate(row.trained):
        if not trained:
            continue
        render = partial(template.render, tools=row.tools, arguments=row.arguments)
        through = render(row.messages[: i + 1]).text
        if not whole.text.startswith(through):
            raise _not_a_prefix(i + 1)
        before = render(row.messages[:i], prompt=True).text
        if not through.startswith(before):
            before = render(row.messages[:i]).text
        if not through.startswith(before):
            raise _not_a_prefix(i)
        spans.append((len(before), len(through)))
    return Rendered(whole.text, tuple(spans))


def _not_a_prefix(messages: int) -> StrettoError:
    return StrettoError(
        f"the template renders messages[:{messages}] otherwise than as the beginning of the whole, so what"
        f" message {messages} adds cannot be told",
        hint="use a template with {% generation %} around what the assistant writes, or train on all tokens",
    )
