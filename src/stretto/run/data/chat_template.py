"""A tokenizer's chat template: Jinja that turns a conversation into the text a chat model was trained on.

Templates come with downloaded models, so processes of their own render them (`template_renderer.py`), in
jinja2's sandbox, with the extensions and functions that `transformers` gives them, and with limits that the
kernel enforces.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from stretto.errors import StrettoError, nearest
from stretto.run.data import template_renderer
from stretto.run.data.boundaries import read_json_object
from stretto.run.data.row_errors import RowError
from stretto.run.data.template_renderer import LENGTH, LONGEST_ANSWER, MEMORY, OUT_OF_MEMORY
from stretto.run.data.tokenizer import TOKENIZER_CONFIG

SECONDS = 5
"""CPU time for one conversation of up to 100 messages."""
PATIENCE_S = 60.0
"""Longest wait for an answer, generous because the machine may be busy."""
_ENVIRONMENT = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")


class ProcessDied(Exception):
    """The process ended instead of answering; the message is the reason."""


class TemplateProcess:
    """A child process that has compiled some templates; ends with this object or this process."""

    def __init__(self, opening: Mapping[str, Any]) -> None:
        """Start it.

        Args:
            opening: `sources` and `variables` of the templates, and `now`.

        Raises:
            ProcessDied: it does not start, or compiling exceeds the limits.
        """
        parent, child = socket.socketpair()
        with child:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    str(template_renderer.__file__),
                    json.dumps([p for p in sys.path if isinstance(p, str)]),
                ],
                stdin=child.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
                start_new_session=True,  # an interrupt at the terminal is this process's to handle
            )
        parent.settimeout(PATIENCE_S)
        self.owner = os.getpid()
        self._socket, self._answers = parent, parent.makefile("rb")
        self.stop = weakref.finalize(self, _stop, parent, self._process, self.owner)
        """Ends the process."""
        self.opened: dict[str, Any] = next(self.ask([json.dumps({**opening, "seconds": SECONDS}).encode()]))

    def ask(self, requests: Sequence[bytes]) -> Iterator[dict[str, Any]]:
        """Yield the answer to each request, in order.

        Args:
            requests: lines of JSON.

        Raises:
            ProcessDied: at the first request without an answer.
        """
        batch = b"\n".join(requests)
        try:
            self._socket.sendall(LENGTH.pack(len(batch)) + batch)
            left = len(requests)
            while left:
                lines, _, texts = self._read().partition(b"\0")
                at = 0
                for line in lines.splitlines():
                    answer = json.loads(line)
                    for sample in answer["samples"]:
                        at, length = at + sample[0], sample[0]
                        sample[0] = texts[at - length : at].decode()
                    left -= 1
                    yield answer
        except (OSError, EOFError, ValueError) as error:
            self.stop()
            raise ProcessDied(self._cause(error)) from None

    def _read(self) -> bytes:
        head = self._answers.read(LENGTH.size)
        if len(head) < LENGTH.size:
            raise EOFError
        (length,) = LENGTH.unpack(head)
        if length > LONGEST_ANSWER + (1 << 24):
            raise ValueError("too long an answer")
        if len(body := self._answers.read(length)) < length:
            raise EOFError
        return body

    def _cause(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"it does not end within {PATIENCE_S:.0f} s"
        code = self._process.returncode
        if code == -signal.SIGXCPU:
            return f"it takes more than {SECONDS} s of the processor"
        if code == OUT_OF_MEMORY:
            return f"it takes more than {MEMORY >> 20:,} MiB of memory"
        status = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"the process that renders it ended with {status}"


def _stop(parent: socket.socket, process: subprocess.Popen[bytes], owner: int) -> None:
    parent.close()
    if os.getpid() == owner:  # not in a fork of it
        process.kill()
        process.wait()


_TEMPLATE_FILE = "chat_template.jinja"

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered conversation, and the spans of characters that the model is to write."""

    text: str
    spans: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A template and the settings that it refers to.

    Attributes:
        source: the Jinja text.
        config: the `tokenizer_config.json` that it came with; its special tokens are variables of templates.
        origin: the file or folder of the template, for messages.
        tool_source: the template for conversations with tools, or None if it is the same.
        now: the time that templates see.
    """

    source: str
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    origin: str = "chat template"
    tool_source: str | None = None
    now: datetime = field(default_factory=datetime.now)
    _idle: list[TemplateProcess] = field(default_factory=list[TemplateProcess], repr=False, compare=False)

    @classmethod
    def find(cls, place: Path, choice: str | None = None) -> ChatTemplate | None:
        """Return the template of the tokenizer at `place`: a folder, or a `tokenizer.json` with its
        neighbours; None if it has none and no `choice` is made.

        Args:
            choice: a template file, or the name of one of the tokenizer's templates; None for its default,
                from `chat_template.jinja` or `chat_template` in `tokenizer_config.json`.

        Raises:
            StrettoError: the choice does not exist, or cannot be read.
        """
        folder = place if place.is_dir() else place.parent
        config = read_json_object(folder / TOKENIZER_CONFIG)
        chosen = _choose(folder, config, choice)
        if chosen is None:
            return None
        return cls(**chosen, config=config)

    @classmethod
    def load(cls, place: Path, choice: str | None = None) -> ChatTemplate:
        """Return the template as `find` does.

        Raises:
            StrettoError: as `find`, or the tokenizer has none.
        """
        if (template := cls.find(place, choice)) is not None:
            return template
        raise StrettoError(
            f"{place}: has no chat template (no {_TEMPLATE_FILE}, no chat_template in {TOKENIZER_CONFIG})",
            hint="give the tokenizer's folder of a chat model, or a template: data.chat_template=FILE.jinja",
        )

    @property
    def special_tokens(self) -> dict[str, str]:
        """The texts of special tokens by name, such as `bos_token` and `eos_token`."""
        tokens = dict[str, str]()
        for name, value in self.config.items():
            text = cast("dict[str, Any]", value).get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                tokens[name] = text
        return tokens

    @property
    def key(self) -> str:
        """Everything that decides what it renders, for fingerprints. A template that asks for today's date
        renders other tokens tomorrow.
        """
        dated = any("strftime_now" in source for source in self._sources)
        today = self.now.strftime("%Y-%m-%d") if dated else ""
        return json.dumps([self.source, self.tool_source, self.special_tokens, today], sort_keys=True)

    def config_bytes(self) -> bytes:
        """Return the content of a `tokenizer_config.json` that carries this template, for `load`."""
        templates: object = self.source
        if self.tool_source is not None:
            named = {"default": self.source, "tool_use": self.tool_source}
            templates = [{"name": name, "template": text} for name, text in named.items()]
        # transformers' AutoTokenizer wants a class
        body = {"tokenizer_class": "PreTrainedTokenizerFast", **self.config, "chat_template": templates}
        return (json.dumps(body, indent=1, ensure_ascii=False) + "\n").encode()

    @property
    def _sources(self) -> list[str]:
        return [self.source, *([] if self.tool_source is None else [self.tool_source])]

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        prompt: bool = False,
        arguments: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """Return the text of a conversation, and the spans of characters inside `{% generation %}` blocks.

        Args:
            messages: mappings with `role` and `content`, and other fields that the template knows.
            tools: descriptions of functions (JSON schemas).
            prompt: end with the beginning of the assistant's answer (`add_generation_prompt`).
            arguments: further variables, such as `enable_thinking`.

        Raises:
            StrettoError: the template refuses the messages, fails, or exceeds its limits.
        """
        request = template_request(messages, tools=tools, prompt=prompt, arguments=arguments)
        (answer,) = self.answers([request])
        if isinstance(answer, RowError):
            raise answer
        return answer[0]

    def answers(self, requests: Sequence[bytes]) -> Iterator[list[Rendered] | RowError]:
        """Yield the samples of each conversation (see `template_request`), or its error.

        Raises:
            StrettoError: the template is not valid.
        """
        count, alone = 0, False
        while count < len(requests):
            process = self._process()
            finished = False
            batch = requests[count : count + 1 if alone else None]
            try:
                for answer in process.ask(batch):
                    count += 1
                    yield self._parsed(answer)
                finished = True
            except ProcessDied as error:
                if alone := len(batch) > 1:  # single requests show which of them is to blame
                    continue
                count += 1
                yield self._failed(str(error))
            finally:
                if finished:
                    self._idle.append(process)
                else:  # its next answer would belong to an abandoned request
                    process.stop()

    def _process(self) -> TemplateProcess:
        """Return an idle process that this process started (not its parent before a fork), or a new one."""
        while self._idle:
            if (process := self._idle.pop()).owner == os.getpid():
                return process
        opening = {"sources": self._sources, "variables": self.special_tokens, "now": self.now.isoformat()}
        try:
            process = TemplateProcess(opening)
        except ProcessDied as error:
            raise StrettoError(
                f"{self.origin}: cannot be compiled: {error}", hint="name another template"
            ) from None
        if (problem := process.opened.get("invalid")) is not None:
            raise StrettoError(
                f"{self.origin}: not a valid template: {problem}", hint="name a file with Jinja text"
            )
        for name in process.opened["tokens"]:  # Jinja would write nothing in its place
            if name not in self.config and f"{name} is defined" not in "".join(self._sources):
                raise StrettoError(
                    f"{self.origin}: names {name}, which {TOKENIZER_CONFIG} does not have",
                    hint=f"copy {TOKENIZER_CONFIG} from the model, or write into it what {name} is (or null)",
                )
        return process

    def _parsed(self, answer: Mapping[str, Any]) -> list[Rendered] | RowError:
        if (problem := answer.get("unaligned")) is not None:
            return RowError(
                "not aligned with the template",
                f"{self.origin}: {problem}",
                hint="give that message weight 0, or use a template with {% generation %} around what the"
                " assistant writes, or train on all tokens",
            )
        if (problem := answer.get("error")) is not None:
            return self._failed(problem)
        return [Rendered(text, tuple((a, b) for a, b in spans)) for text, spans in answer["samples"]]

    def _failed(self, problem: str) -> RowError:
        return RowError(
            "not rendered by the template",
            f"{self.origin}: cannot render the conversation: {problem[:300]}",
            hint="look at the roles and their order, or name another template",
        )


def template_request(
    messages: Sequence[Message],
    *,
    tools: Sequence[Any] | None = None,
    prompt: bool = False,
    arguments: Mapping[str, Any] | None = None,
    trained: Sequence[bool] | None = None,
) -> bytes:
    """Return a conversation as `ChatTemplate.answers` takes it; arguments as for `ChatTemplate.render`.

    Args:
        trained: for each message, whether the model is to write it; None if only the text is needed.
    """
    fields = {"messages": messages, "tools": tools, "prompt": prompt, "arguments": arguments or {}}
    try:  # values of Parquet such as times are rendered as texts
        return json.dumps({**fields, "trained": trained}, default=str).encode()
    except (RecursionError, ValueError) as error:
        raise StrettoError(f"a conversation cannot be written as JSON: {error}") from None


def _choose(folder: Path, config: Mapping[str, Any], choice: str | None) -> dict[str, Any] | None:
    """Return the texts and the origin of the chosen template, as arguments of `ChatTemplate`."""
    if choice is not None and (file := Path(choice).expanduser()).is_file():
        return {"source": _text(file), "origin": str(file)}
    named = _named(config.get("chat_template"))
    if (file := folder / _TEMPLATE_FILE).is_file():
        named["default"] = _text(file)
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        named[file.stem] = _text(file)
    wanted = choice or "default"
    origin = f"{folder}: template {choice!r}" if choice else f"chat template of {folder}"
    if wanted in named:
        tools = named.get("tool_use") if choice is None else None
        return {"source": named[wanted], "tool_source": tools, "origin": origin}
    if choice is None:
        return None
    close = nearest(choice, named)
    available = f"templates there: {', '.join(named)}" if named else "the tokenizer has no templates"
    raise StrettoError(
        f"chat template {choice!r}: no such file, and no template of that name in {folder}",
        hint=f"did you mean {close}?" if close else available,
    )


def _named(value: object) -> dict[str, str]:
    """Return the templates in `chat_template`: one text, or a list of {"name", "template"}."""
    if isinstance(value, str):
        return {"default": value}
    named = dict[str, str]()
    for entry in cast(list[Any], value) if isinstance(value, list) else []:
        match entry:
            case {"name": str(name), "template": str(template)}:
                named[name] = template
            case _:
                raise StrettoError(
                    f"chat_template in {TOKENIZER_CONFIG} has an entry that is no named template",
                    hint='a text, or [{"name": "default", "template": "..."}]',
                )
    return named


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StrettoError(f"{path}: cannot be read: {error}", hint="name a UTF-8 text file") from None
