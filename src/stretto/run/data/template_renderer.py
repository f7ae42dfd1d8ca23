"""A program of its own that renders conversations by a chat template which nobody has to trust.

python template_renderer.py SYS_PATH

It imports jinja2 and the standard library alone, closes all files but the socket that is its standard input,
gives up by resource limits what rendering does not need, and only then reads templates and conversations from
the socket. It answers with text and ends when the other end is closed. `chat_template.py` starts it.
"""

from __future__ import annotations

import json
import os
import re
import resource
import secrets
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from io import FileIO
from typing import Any

if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[1])  # the jinja2 that the caller would import

# jinja2 and Python load these when they are first used: too late, once no file can be opened.
import encodings.idna  # pyright: ignore[reportUnusedImport]
import encodings.unicode_escape  # pyright: ignore[reportUnusedImport]
import html
import pprint
import random
import textwrap
import unicodedata

import jinja2
import jinja2.debug
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_LOADED = (encodings, html, pprint, random, textwrap, unicodedata, jinja2.debug)
MEMORY = 1 << 30
"""Bytes of address space."""
LONGEST_ANSWER = 1 << 26
"""Bytes."""
TOGETHER = 1 << 16
"""Characters of answers that are sent together."""
OUT_OF_MEMORY = 3
"""Exit code."""
LENGTH = struct.Struct("!Q")
"""What precedes each message on the socket: its number of bytes."""

Span = tuple[int, int]
Sample = tuple[str, list[Span]]
Answer = dict[str, Any]
Message = Mapping[str, Any]
_PROBE = "\ufdd1"
"""Content that no message has: a noncharacter."""
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def main() -> None:
    """Answer until the socket is closed."""
    incoming, outgoing = FileIO(os.dup(0)), FileIO(os.dup(0), "w")
    os.chdir("/")
    os.closerange(0, incoming.fileno())
    os.closerange(outgoing.fileno() + 1, 1 << 16)
    limit_resources()
    try:
        opening: dict[str, Any] = json.loads(_read(incoming))
        _allow_seconds(opening["seconds"])
        renderer = Renderer(opening)
        _write(outgoing, [{"tokens": renderer.tokens}])
    except jinja2.TemplateSyntaxError as error:
        return _write(outgoing, [{"invalid": f"line {error.lineno}: {error.message}"}])
    except RecursionError:
        return _write(outgoing, [{"invalid": "it nests too deeply"}])
    except SyntaxError as error:  # in the Python that Jinja makes: too many loops, or `break` without one
        return _write(outgoing, [{"invalid": error.msg}])
    except (ValueError, TypeError, OverflowError) as error:  # of constants
        return _write(outgoing, [{"invalid": f"{type(error).__name__}: {error}"[:1000]}])
    while batch := _read(incoming):
        answers, size = list[Answer](), 0
        began = time.process_time()
        for request in batch.split(b"\n"):
            answers.append(renderer.answer(request))
            size += 256 + sum(len(text) for text, _ in answers[-1].get("samples", ()))
            if size > TOGETHER or time.process_time() > began + 0.1:
                _write(outgoing, answers)
                answers, size = list[Answer](), 0
                began = time.process_time()
        if answers:
            _write(outgoing, answers)
    return None


def limit_resources() -> None:
    """Give up memory above `MEMORY`, opening files and sockets, writing files and new processes for good."""
    limits = [(resource.RLIMIT_NOFILE, 0), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)]
    if hasattr(resource, "RLIMIT_NPROC"):
        limits.append((resource.RLIMIT_NPROC, 0))
    if sys.platform == "linux":  # elsewhere the limit does not hold, or cannot be set
        limits += [(resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_DATA, MEMORY)]
    for kind, limit in limits:
        hard = resource.getrlimit(kind)[1]
        lower = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (lower, lower))


def _allow_seconds(seconds: int) -> None:
    """Let the kernel end this process once it has computed for so many more seconds (SIGXCPU)."""
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    until = int(time.process_time()) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (until if hard == -1 else min(until, hard), hard))


def _read(stream: FileIO) -> bytes:
    """Return the next message; empty at the end."""
    (length,) = LENGTH.unpack(_exactly(stream, LENGTH.size) or bytes(LENGTH.size))
    return _exactly(stream, length)


def _exactly(stream: FileIO, length: int) -> bytes:
    data = bytearray(length)
    missing = memoryview(data)
    while missing:
        if not (count := stream.readinto(missing)):
            return b""
        missing = missing[count:]
    return bytes(data)


def _write(stream: FileIO, answers: Sequence[Answer]) -> None:
    """Send a line of JSON for each answer, then NUL and the texts of all, whose lengths the lines have."""
    lines, texts = zip(*map(_packed, answers), strict=True)
    body = b"\n".join(lines) + b"\0" + b"".join(texts)
    unsent = memoryview(LENGTH.pack(len(body)) + body)
    while unsent:
        unsent = unsent[stream.write(unsent) :]


def _packed(answer: Answer) -> tuple[bytes, bytes]:
    """Return the line of an answer, and its texts."""
    try:
        texts = [text.encode() for text, _ in answer.get("samples", ())]
        sizes = [
            (len(text), spans) for text, (_, spans) in zip(texts, answer.get("samples", ()), strict=True)
        ]
        line = _encode({**answer, "samples": sizes}).encode()
    except UnicodeEncodeError:
        return _packed({"error": "there is half a surrogate pair in it, which is no character"})
    if len(line) + sum(map(len, texts)) > LONGEST_ANSWER:
        return _packed({"error": f"what it renders is longer than {LONGEST_ANSWER >> 20} MiB"})
    return line, b"".join(texts)


class Unaligned(Exception):
    """The assistant's text cannot be located in the rendered text."""


class Renderer:
    """The compiled templates.

    Attributes:
        marks: for each template, whether `{% generation %}` blocks mark what the model writes.
        tokens: the special tokens that the templates name, such as `eos_token`.
    """

    def __init__(self, opening: Mapping[str, Any]) -> None:
        environment = sandbox(datetime.fromisoformat(opening["now"]))
        trees = [environment.parse(source) for source in opening["sources"]]
        self.marks = [_Generation.is_in(tree) for tree in trees]
        self._templates = [
            jinja2.Template.from_code(environment, environment.compile(tree), environment.make_globals(None))
            for tree in trees
        ]
        names = set[str]().union(*map(find_undeclared_variables, trees))
        self.tokens = sorted(name for name in names if name.endswith("_token"))
        self._variables: dict[str, Any] = opening["variables"]
        self._seconds: int = opening["seconds"]

    def answer(self, line: bytes) -> Answer:
        """Return the samples of a conversation, or the error."""
        try:
            request: dict[str, Any] = json.loads(line)
            _allow_seconds(self._seconds + len(request["messages"]) // 100)
            return {"samples": self._samples(request)}
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except RecursionError:
            return {"error": "it recurses without end"}
        except Unaligned as error:
            return {"unaligned": str(error)}
        except jinja2.TemplateError as error:
            return {"error": str(error.message or error)[:1000]}
        except Exception as error:  # whatever the template's expressions raise
            return {"error": f"{type(error).__name__}: {error}"[:1000]}

    def _samples(self, request: Mapping[str, Any]) -> list[Sample]:
        number = -1 if request["tools"] else 0
        messages: list[Message] = request["messages"]
        trained: list[bool] | None = request["trained"]

        def render(of: Sequence[Message], prompt: bool = False) -> Sample:
            return self._render(self._templates[number], {**request, "messages": list(of)}, prompt)

        if trained is None:
            return [render(messages, request["prompt"])]
        if self.marks[number]:
            return [by_blocks(render(messages), messages, trained)]
        return by_prefixes(lambda of, prompt: render(of, prompt)[0], messages, trained)

    def _render(self, template: jinja2.Template, request: Mapping[str, Any], prompt: bool) -> Sample:
        marker = f"\ufdd0{secrets.token_hex(4)}"  # a noncharacter: no text has it
        variables: dict[str, Any] = {
            **self._variables,
            **request["arguments"],
            "messages": request["messages"],
            "tools": request["tools"] or None,
            "documents": None,
            "add_generation_prompt": prompt,
            _MARKER: marker,
        }
        return _unmarked(template.render(variables), marker)


# ---------------------------------------------------------------------- what the assistant writes


def by_blocks(rendered: Sample, messages: Sequence[Message], trained: Sequence[bool]) -> Sample:
    """Return the sample with the spans of the template's `{% generation %}` blocks: all, or those of the
    messages that are trained on.

    Raises:
        Unaligned: blocks and messages cannot be matched, or the last block leaves out text of the message.
    """
    text, spans = rendered
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if len(spans) < len(turns) or (len(spans) > len(turns) and not all(trained[i] for i in turns)):
        raise Unaligned(
            f"{len(turns)} messages of the assistant, {sum(trained)} of them trained on, but the template"
            f" marks {len(spans)} blocks"
        )
    if len(spans) == len(turns):
        spans = [span for span, i in zip(spans, turns, strict=True) if trained[i]]
    if turns and trained[turns[-1]]:  # a template may well take the thoughts out of earlier turns
        _check_written(messages, turns[-1], "".join(text[a:b] for a, b in spans))
    return text, spans


def by_prefixes(
    render: Callable[[Sequence[Message], bool], str], messages: Sequence[Message], trained: Sequence[bool]
) -> list[Sample]:
    """Return the samples that result from rendering the conversation up to each message that is trained on,
    with and without it.

    The text that a message adds, after the words that open the assistant's turn, is the model's to write.
    Turns whose text is a beginning of the longer conversation's are spans of that; if the template renders
    earlier turns otherwise (without their thoughts, say), a turn is the end of a sample of its own, as when
    the model wrote it.

    Raises:
        Unaligned: the template does not continue the text before a message, leaves out text of one, or does
            not end it.
    """
    samples: list[Sample] = [(render(messages, False), [])]
    for i in reversed([i for i, on in enumerate(trained) if on]):
        through = samples[0][0] if i + 1 == len(messages) else render(messages[: i + 1], False)
        start = _turn_start(render, messages[: i + 1], through)
        _check_written(messages, i, through[start:])
        through += _end_of_turn(render, messages[: i + 1], through)
        if not samples[-1][0].startswith(through):
            samples.append((through, []))
        samples[-1][1].append((start, len(through)))
    if len(samples) > 1 and not samples[0][1]:  # only what follows the last trained turn
        del samples[0]
    return [(text, spans[::-1]) for text, spans in reversed(samples)]


def _turn_start(
    render: Callable[[Sequence[Message], bool], str], messages: Sequence[Message], through: str
) -> int:
    """Return the start of the last message's text, after the words that open its turn."""
    *earlier, _ = messages
    prompt = render(earlier, True)
    if through.startswith(prompt):
        return len(prompt)
    # The template opens the turn in other words if it asks for an answer, such as with "<think>".
    before = render(earlier, False)
    other = render([*earlier, _probe("assistant")], False)
    if all(text.startswith(before) for text in (prompt, other)):
        opening = os.path.commonprefix([prompt[len(before) :], other[len(before) :]])  # noqa: RUF071 (no paths)
        opening = re.sub(r"[<\[][^>\]]*$", "", opening)  # not a part of a special token
        if through.startswith(before + opening):
            return len(before + opening)
    raise Unaligned(
        f"what message {len(messages)} adds cannot be told, since the template renders the {len(earlier)}"
        " before it otherwise with it than when it asks for it"
    )


def _end_of_turn(
    render: Callable[[Sequence[Message], bool], str], messages: Sequence[Message], through: str
) -> str:
    """Return the text with which the model is to end the last message, if the template writes it only once
    another message follows.
    """
    *earlier, last = messages
    content = (last.get("content") or "").rpartition("</think>")[2].strip()
    calls = last.get("tool_calls")
    if not calls and not (content and through.endswith(content)):
        return ""
    if calls and not render([*earlier, _probe("assistant")], False).endswith(_PROBE):
        return ""
    answered = render([*earlier, _probe("assistant"), {"role": "user", "content": ""}], False)
    end = _token(answered.rpartition(_PROBE)[2])
    if calls and end and not through.rstrip().endswith(end):
        following = render([*messages, _probe("tool")], False)
        end = _token(following[len(through) :]) if following.startswith(through) else ""
    elif calls:
        return ""
    if not end:
        raise Unaligned(
            f"nothing tells the model to end message {len(messages)}: the template does not end its turn"
        )
    return end


def _token(text: str) -> str:
    """Return the special token that a text begins with."""
    match = re.match(r"<[^<>]+>|\[[^\[\]]+\]", text)
    return match.group() if match and _PROBE not in match.group() else ""


def _probe(role: str) -> Message:
    return {"role": role, "content": _PROBE}


def _check_written(messages: Sequence[Message], i: int, written: str) -> None:
    """Raise Unaligned if text of a message is missing from what the template writes for it."""
    message, texts = messages[i], list[str]()
    for name in ("content", "reasoning_content", "thinking"):
        if isinstance(text := message.get(name), str):
            texts += re.split("</?think>", text)
    for call in message.get("tool_calls") or ():
        texts.append(str((call.get("function") or call).get("name", "")))
    squeezed = "".join(written.split())  # templates strip texts
    for piece in texts:
        if "".join(piece.split()) not in squeezed:
            raise Unaligned(f"message {i + 1} says {piece.strip()[:80]!r}, which the template leaves out")


# ---------------------------------------------------------------------- the sandbox

_MARKER = "stretto_marker"


def sandbox(now: datetime) -> ImmutableSandboxedEnvironment:
    """Return Jinja's sandbox, with the extensions and functions that `transformers` gives templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    functions: dict[str, Any] = {"raise_exception": _raise, "strftime_now": now.strftime}
    environment.globals.update(functions)
    del environment.globals["lipsum"]
    return environment


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}`: its text appears between two marks."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the block as a call that marks its text."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("marked", [nodes.Name(_MARKER, "load")])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def marked(self, marker: str, caller: Callable[[], str]) -> str:
        """Return the text of the block between marks."""
        return f"{marker}<{caller()}{marker}>"

    @staticmethod
    def is_in(tree: nodes.Template) -> bool:
        """Return True if a template has such a block."""
        calls = tree.find_all(nodes.ExtensionAttribute)
        return any(call.identifier == _Generation.identifier for call in calls)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the escapes of HTML that Jinja's own filter adds."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _unmarked(text: str, marker: str) -> Sample:
    """The text without marks, and what they enclose."""
    parts, starts = list[str](), list[int]()
    spans = list[Span]()
    length = 0
    for number, piece in enumerate(text.split(marker)):
        if number:
            sign, piece = piece[0], piece[1:]
            if sign == "<":
                starts.append(length)
            else:
                spans.append((starts.pop(), length))
        parts.append(piece)
        length += len(piece)
    return "".join(parts), spans


if __name__ == "__main__":
    try:
        main()
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
