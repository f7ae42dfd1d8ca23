"""A tokenizer's chat template: Jinja that turns a conversation into the text a chat model was trained on.

Templates come with downloaded models, so processes of their own render them, in jinja2's sandbox, with the
extensions and functions that `transformers` gives them (`template_renderer.py`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Never, cast

from stretto.errors import StrettoError, nearest
from stretto.run.data.row_errors import RowError
from stretto.run.data.template_process import ProcessDied, TemplateProcess
from stretto.run.data.tokenizer import TOKENIZER_CONFIG

_TEMPLATE_FILE = "chat_template.jinja"

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered conversation, and the spans of characters that the model is to write."""

    text: str
    spans: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A template and what it refers to.

    Attributes:
        source: the Jinja text.
        config: the `tokenizer_config.json` that it came with; its special tokens are variables of templates.
        origin: where the template was read, for messages.
        tool_source: the template for conversations with tools, where there is a separate one.
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
        """The template of the tokenizer at `place`: a folder, or a `tokenizer.json` with its neighbours. None
        where it has none and no `choice` is made.

        Args:
            choice: a template file, or the name of one of the tokenizer's templates; None: its default, from
                `chat_template.jinja` or `chat_template` in `tokenizer_config.json`.

        Raises:
            StrettoError: the choice is not there, or cannot be read.
        """
        folder = place if place.is_dir() else place.parent
        config = _read_config(folder / TOKENIZER_CONFIG)
        chosen = _choose(folder, config, choice)
        if chosen is None:
            return None
        return cls(**chosen, config=config)

    @classmethod
    def load(cls, place: Path, choice: str | None = None) -> ChatTemplate:
        """As `find`.

        Raises:
            StrettoError: there is none, too.
        """
        return cls.find(place, choice) or _raise_missing(place)

    @property
    def special_tokens(self) -> dict[str, str]:
        """Such as `bos_token` and `eos_token`: their text."""
        tokens = dict[str, str]()
        for name, value in self.config.items():
            text = cast("dict[str, Any]", value).get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                tokens[name] = text
        return tokens

    @property
    def facts(self) -> str:
        """All that decides what it renders, for fingerprints. A template that asks for today's date renders
        other tokens tomorrow.
        """
        dated = any("strftime_now" in source for source in self._sources)
        today = self.now.strftime("%Y-%m-%d") if dated else ""
        return json.dumps([self.source, self.tool_source, self.special_tokens, today], sort_keys=True)

    def config_bytes(self) -> bytes:
        """The content of a `tokenizer_config.json` that carries this template, for `load`."""
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
        """The text of a conversation, and the spans of characters inside `{% generation %}` blocks.

        Args:
            messages: mappings with `role` and `content`, and what else the template knows.
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
        """What each of some conversations (see `template_request`) becomes, or why it does not.

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
                if alone := len(batch) > 1:  # one of them is to blame: which, single requests show
                    continue
                count += 1
                yield self._failed(str(error))
            finally:
                if finished:
                    self._idle.append(process)
                else:  # its next answer would belong to an abandoned request
                    process.stop()

    def _process(self) -> TemplateProcess:
        """An idle process that this process started (not its parent before a fork), or a new one."""
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
        if (why := process.opened.get("invalid")) is not None:
            raise StrettoError(
                f"{self.origin}: not a valid template: {why}", hint="name a file with Jinja text"
            )
        for name in process.opened["tokens"]:  # Jinja would write nothing in its place
            if name not in self.config and f"{name} is defined" not in "".join(self._sources):
                raise StrettoError(
                    f"{self.origin}: names {name}, which {TOKENIZER_CONFIG} does not have",
                    hint=f"copy {TOKENIZER_CONFIG} from the model, or write into it what {name} is (or null)",
                )
        return process

    def _parsed(self, answer: Mapping[str, Any]) -> list[Rendered] | RowError:
        if (why := answer.get("unaligned")) is not None:
            return RowError(
                "not aligned with the template",
                f"{self.origin}: {why}",
                hint="give that message weight 0, or use a template with {% generation %} around what the"
                " assistant writes, or train on all tokens",
            )
        if (why := answer.get("error")) is not None:
            return self._failed(why)
        return [Rendered(text, tuple((a, b) for a, b in spans)) for text, spans in answer["samples"]]

    def _failed(self, why: str) -> RowError:
        return RowError(
            "not rendered by the template",
            f"{self.origin}: cannot render the conversation: {why[:300]}",
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
    """A conversation as `ChatTemplate.answers` takes it; arguments as `ChatTemplate.render`.

    Args:
        trained: whether the model is to write each message; None: only the text is asked for.
    """
    fields = {"messages": messages, "tools": tools, "prompt": prompt, "arguments": arguments or {}}
    try:  # values of Parquet such as times are rendered as texts
        return json.dumps({**fields, "trained": trained}, default=str).encode()
    except (RecursionError, ValueError) as error:
        raise StrettoError(f"a conversation cannot be written as JSON: {error}") from None


def _read_config(path: Path) -> dict[str, Any]:
    try:
        body: object = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise StrettoError(f"{path}: cannot be read: {error}", hint="copy it from its model again") from None
    if not isinstance(body, dict):
        raise StrettoError(f"{path}: not a JSON object", hint="copy it from its model again")
    return cast(dict[str, Any], body)


def _raise_missing(place: Path) -> Never:
    raise StrettoError(
        f"{place}: has no chat template (no {_TEMPLATE_FILE}, no chat_template in {TOKENIZER_CONFIG})",
        hint="give the tokenizer's folder of a chat model, or a template: data.chat_template=FILE.jinja",
    )


def _choose(folder: Path, config: Mapping[str, Any], choice: str | None) -> dict[str, Any] | None:
    """The texts and the origin of the chosen template, as arguments of `ChatTemplate`."""
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
    near = nearest(choice, named)
    known = f"templates there: {', '.join(named)}" if named else "the tokenizer has no templates"
    raise StrettoError(
        f"chat template {choice!r}: no such file, and no template of that name in {folder}",
        hint=f"did you mean {near}?" if near else known,
    )


def _named(value: object) -> dict[str, str]:
    """The templates in `chat_template`: one text, or a list of {"name", "template"}."""
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
