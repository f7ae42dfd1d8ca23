"""A tokenizer's chat template: Jinja that turns a conversation into the text a chat model was trained on.

Templates come with downloaded models, so they run in jinja2's sandbox, with the extensions and functions that
`transformers` gives them, and with limits on their steps and on the length of what they build.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Never, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from stretto.errors import StrettoError, nearest
from stretto.run.data.tokenizer import TOKENIZER_CONFIG

_TEMPLATE_FILE = "chat_template.jinja"
MOST_STEPS = 1_000_000
"""Rounds of all loops of one rendering."""
MOST_CHARACTERS = 1 << 26
"""Length of any text that a template builds."""

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered conversation, and the spans of characters inside `{% generation %}` blocks."""

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
    """

    source: str
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    origin: str = "chat template"
    tool_source: str | None = None

    @classmethod
    def find(cls, place: Path, choice: str | None = None) -> ChatTemplate | None:
        """The template of the tokenizer at `place`: a folder, or a `tokenizer.json` with its neighbours. None
        where it has none and no `choice` is made.

        Args:
            choice: a template file, or the name of one of the tokenizer's templates; None: its default, from
                `chat_template.jinja` or `chat_template` in `tokenizer_config.json`.

        Raises:
            StrettoError: the choice is not there, cannot be read, or is not valid Jinja.
        """
        folder = place if place.is_dir() else place.parent
        config = _read_config(folder / TOKENIZER_CONFIG)
        chosen = _choose(folder, config, choice)
        if chosen is None:
            return None
        template = cls(**chosen, config=config)
        _ = template._compiled
        return template

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

    @cached_property
    def marks(self) -> bool:
        """Whether the template says by `{% generation %}` what the model writes."""
        return any(_Generation.mark_in(_environment().parse(source)) for source in self._sources)

    @property
    def facts(self) -> str:
        """All that decides what it renders, for fingerprints. A template that asks for today's date renders
        other tokens tomorrow.
        """
        dated = any("strftime_now" in source for source in self._sources)
        today = datetime.now().strftime("%Y-%m-%d") if dated else ""
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

    @cached_property
    def _compiled(self) -> list[jinja2.Template]:
        try:
            return [_compile(source) for source in self._sources]
        except jinja2.TemplateSyntaxError as error:
            raise StrettoError(
                f"{self.origin}: not a valid template: line {error.lineno}: {error.message}",
                hint="name a file with Jinja text",
            ) from None

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        prompt: bool = False,
        arguments: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """The text of a conversation.

        Args:
            messages: mappings with `role` and `content`, and what else the template knows.
            tools: descriptions of functions (JSON schemas).
            prompt: end with the beginning of the assistant's answer (`add_generation_prompt`).
            arguments: further variables, such as `enable_thinking`.

        Raises:
            StrettoError: the template refuses the messages, fails, or exceeds its limits.
        """
        template = self._compiled[-1 if tools else 0]
        marker = f"\ufdd0{secrets.token_hex(4)}"  # a noncharacter: no text has it
        variables: dict[str, Any] = {
            **self.special_tokens,
            **(arguments or {}),
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": prompt,
            _MARKER: marker,
            _BUDGET: _Budget(),
        }
        try:
            return _unmarked(template.render(variables), marker)
        except RecursionError:
            raise self._failed("it recurses without end") from None
        except MemoryError:
            raise self._failed("it runs out of memory") from None
        except jinja2.TemplateError as error:
            raise self._failed(str(error.message or error)) from None
        except Exception as error:  # whatever the template's expressions raise
            raise self._failed(f"{type(error).__name__}: {error}") from None

    def _failed(self, why: str) -> StrettoError:
        return StrettoError(
            f"{self.origin}: cannot render the conversation: {why[:300]}",
            hint="look at the roles and their order, or name another template",
        )


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
    entries = cast(list[Any], value) if isinstance(value, list) else []
    return {entry["name"]: entry["template"] for entry in entries if {"name", "template"} <= set(entry)}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StrettoError(f"{path}: cannot be read: {error}", hint="name a UTF-8 text file") from None


# ---------------------------------------------------------------------- the sandbox

_BUDGET, _MARKER = "stretto_budget", "stretto_marker"


class _Budget:
    """What one rendering may still do."""

    def __init__(self) -> None:
        self._steps = MOST_STEPS

    def counted(self, items: Iterable[Any]) -> Iterator[Any]:
        """The items of a loop."""
        for item in items:
            self._steps -= 1
            if self._steps < 0:
                raise jinja2.TemplateRuntimeError(f"more than {MOST_STEPS} rounds of loops")
            yield item

    @staticmethod
    def bounded(text: Any) -> Any:
        """A text that an expression has built."""
        if isinstance(text, str | list | tuple) and len(cast("Sequence[Any]", text)) > MOST_CHARACTERS:
            raise jinja2.TemplateRuntimeError(f"a text of more than {MOST_CHARACTERS} characters")
        return text


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox; it also checks the size of what operators build."""

    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """The operator's result.

        Raises:
            jinja2.TemplateRuntimeError: it is too large.
        """
        if operator == "**" or (operator == "*" and not _small_product(left, right)):
            raise jinja2.TemplateRuntimeError(f"the operator {operator} may not be used that way")
        return _Budget.bounded(super().call_binop(context, operator, left, right))


def _small_product(left: Any, right: Any) -> bool:
    """Whether a product is of numbers, or repeats a text not too often."""
    sizes = [x if isinstance(x, int | float) else len(x) for x in (left, right)]
    return abs(sizes[0] * sizes[1]) <= MOST_CHARACTERS


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}`: its text appears between two marks."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        """The block as a call that marks its text."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("marked", [nodes.Name(_MARKER, "load")])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def marked(self, marker: str, caller: Callable[[], str]) -> str:
        """The text of the block between marks."""
        return f"{marker}<{caller()}{marker}>"

    @staticmethod
    def mark_in(tree: nodes.Template) -> bool:
        """Whether a template has such a block."""
        calls = tree.find_all(nodes.ExtensionAttribute)
        return any(call.identifier == _Generation.identifier for call in calls)


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    functions: dict[str, Any] = {"raise_exception": _raise, "strftime_now": _strftime_now}
    environment.globals.update(functions)
    del environment.globals["lipsum"]
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the escapes of HTML that Jinja's own filter adds."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _compile(source: str) -> jinja2.Template:
    """The template, with every loop counted and every concatenation bounded."""
    environment = _environment()
    tree = environment.parse(source)
    for loop in tree.find_all(nodes.For):
        loop.iter = _checked("counted", loop.iter)
    code = environment.compile(_Concatenations().visit(tree))
    return jinja2.Template.from_code(environment, code, environment.make_globals(None))


class _Concatenations(NodeTransformer):
    """Bounds the result of each `~`."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 (jinja2 finds it by this name)
        """The node within a check."""
        return _checked("bounded", self.generic_visit(node))


def _checked(method: str, value: nodes.Node) -> nodes.Call:
    function = nodes.Getattr(nodes.Name(_BUDGET, "load"), method, "load")
    call = nodes.Call(function, [cast(nodes.Expr, value)], [], None, None)
    return cast(nodes.Call, call.set_lineno(value.lineno))


def _unmarked(text: str, marker: str) -> Rendered:
    """The text without marks, and what they enclose."""
    parts, starts = list[str](), list[int]()
    spans = list[tuple[int, int]]()
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
    return Rendered("".join(parts), tuple(spans))
