from __future__ import annotations

import json
from pathlib import Path

import pytest

from chats import TEMPLATES, chat, tokenizer_folder
from stretto.errors import StrettoError
from stretto.run.data import chat_template
from stretto.run.data.chat_template import ChatTemplate


def render(source: str) -> str:
    return ChatTemplate(source=source).render([{"role": "user", "content": "hi"}]).text


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "rounds of loops"),
        (
            "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
            "characters",
        ),
        (
            "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
            "characters",
        ),
        ("{{ 'a' * 9999999999 }}", "may not be used"),
        ("{{ 10 ** 10 ** 10 }}", "may not be used"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recurses"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ raise_exception('not so') }}", "not so"),
        ("{{ messages[5].role }}", "no element 5"),
        ("{{ lipsum(9999) }}", "lipsum"),
    ],
)
def test_runaway_and_prying_templates_are_stopped(source: str, error: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chat_template, "MOST_STEPS", 10_000)
    monkeypatch.setattr(chat_template, "MOST_CHARACTERS", 1 << 16)
    with pytest.raises(StrettoError, match=error):
        render(source)


def test_checks_change_nothing_of_what_is_rendered():
    assert (
        render(
            "{% for x in [1, 2] %}{{ loop.index }}/{{ loop.length }}{{ ', ' if not loop.last }}{% endfor %}"
        )
        == "1/2, 2/2"
    )
    assert (
        render("{% for k, v in {'a': 1}.items() if v %}{{ k ~ v ~ 'x' }}{% else %}none{% endfor %}") == "a1x"
    )
    assert render("{{ 'ab' * 2 + 'c' }}{{ 7 % 4 }}{{ '%d' % 3 }}{{ 2 * 3 }}") == "ababc336"
    assert render("{% for x in undefined_name %}{% else %}nothing{% endfor %}") == "nothing"
    assert render("{{ {'b': '<ü>'} | tojson }}") == '{"b": "<ü>"}'


def test_blocks_are_told_wherever_they_are_rendered():
    source = "{% set x %}ab{% generation %}cd{% endgeneration %}{% endset %}<{{ x }}>{{ x }}"
    rendered = ChatTemplate(source=source).render([])
    assert rendered.text == "<abcd>abcd"
    assert [rendered.text[a:b] for a, b in rendered.spans] == ["cd", "cd"]


def test_where_templates_come_from(tmp_path: Path):
    place = tokenizer_folder(tmp_path, "chatml")
    assert ChatTemplate.load(place).source == ChatTemplate.load(place / "tokenizer.json").source
    assert ChatTemplate.load(place).special_tokens == {"eos_token": "<|im_end|>"}
    (place / "chat_template.jinja").write_text("beside {{ eos_token }}")
    assert ChatTemplate.load(place).render(chat(1)).text == "beside <|im_end|>"
    (place / "chat_template.jinja").unlink()
    named = [
        {"name": "default", "template": "d"},
        {"name": "tool_use", "template": "t"},
        {"name": "rag", "template": "r"},
    ]
    (place / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate.load(place)
    assert (template.render([]).text, template.render([], tools=[{}]).text) == ("d", "t")
    assert ChatTemplate.load(place, "rag").render([], tools=[{}]).text == "r"
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "tokenizer_config.json").write_bytes(template.config_bytes())
    kept = ChatTemplate.load(tmp_path / "kept")
    assert (kept.render([]).text, kept.render([], tools=[{}]).text) == ("d", "t")
    with pytest.raises(StrettoError, match="did you mean rag"):
        ChatTemplate.load(place, "rga")
    (place / "bad.jinja").write_text("{% for x in y %}")
    with pytest.raises(StrettoError, match=r"bad\.jinja: not a valid template: line 1"):
        ChatTemplate.load(place, str(place / "bad.jinja"))
    (tmp_path / "nowhere").mkdir()
    assert ChatTemplate.find(tmp_path / "nowhere") is None
    with pytest.raises(StrettoError, match="has no chat template"):
        ChatTemplate.load(tmp_path / "nowhere")


def test_templates_that_ask_for_the_date_are_fingerprinted_by_day():
    assert ChatTemplate(source="{{ strftime_now('%Y') }}").facts != ChatTemplate(source="x").facts
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert ChatTemplate(source=TEMPLATES["gemma"]).marks
