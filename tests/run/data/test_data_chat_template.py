from __future__ import annotations

import json
import os
import resource
import signal
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import pytest

from chats import chat, tokenizer_folder
from stretto.errors import StrettoError
from stretto.run.data import chat_template
from stretto.run.data.chat_template import ChatTemplate, template_request
from stretto.run.data.template_renderer import sandbox


def render(source: str) -> str:
    return ChatTemplate(source=source).render([{"role": "user", "content": "hi"}]).text


def rounds(step: str, start: str = "'ab'", count: int = 60) -> str:
    loop = f"{{% for i in range({count}) %}}{step}{{% endfor %}}"
    return f"{{% set n = namespace(x={start}) %}}{loop}{{{{ n.x }}}}"


BOMBS = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "thirty loops": "".join(f"{{% for i{k} in range(9) %}}" for k in range(30)) + "{% endfor %}" * 30,
    "parentheses": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "lists": "{{ " + "[" * 3000 + "1" + "]" * 3000 + " }}",
    "blocks": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "doubled by ~": rounds("{% set n.x = n.x ~ n.x %}"),
    "doubled by +": rounds("{% set n.x = n.x + n.x %}"),
    "doubled list": rounds("{% set n.x = n.x + n.x %}", "[1]"),
    "doubled by join": rounds("{% set n.x = [n.x, n.x] | join %}"),
    "doubled by replace": rounds("{% set n.x = n.x | replace('a', 'aa') %}", "'aa'"),
    "doubled blocks": "{% set x %}abcdefgh{% endset %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 40,
    "repeated": "{{ 'a' * 9999999999 }}",
    "power": "{{ (messages | length + 9) ** (10 ** 10) }}",
    "center": "{{ 'a' | center(3000000000) }}",
    "ljust": "{{ messages[0].content.ljust(3000000000) }}",
    "zfill": "{{ messages[0].content.zfill(3000000000) }}",
    "percent": "{{ '%3000000000d' % 1 }}",
    "format": "{{ '{:>3000000000}'.format(1) }}",
    "format filter": "{{ '%3000000000s' | format(messages[0].content) }}",
    "indent": "{{ ('a\n' * 1000000) | indent(3000) }}",
    "tojson": "{{ [[1]] | tojson(indent=3000000000) }}",
    "batch": "{{ [1] | batch(3000000000, 'x') | list }}",
    "slice": "{{ [1] | slice(3000000000) | list }}",
    "round": "{{ (10 ** 9999) | round(-99999999, 'floor') }}",
    "wordwrap": "{{ ('a ' * 10000000) | wordwrap(1) }}",
    "title": "{{ ('a ' * 100000000) | title }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "two recursions": "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n }}{% endmacro %}{{ f(60) }}",
    "recursive loop": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "output": "{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}",
    "answer": "{% for i in range(99) %}{{ 'a' * 999999 }}{% endfor %}",
    "message": "{{ raise_exception('x' * 90000000) }}",
}


# one that grows by each kind of operation
FEW = (
    *("thirty loops", "lists", "blocks", "doubled blocks", "repeated", "power", "indent", "two recursions"),
    "output",
)


@pytest.mark.parametrize(
    "names", [FEW, pytest.param(tuple(BOMBS), marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_bombs_end_in_one_error_within_seconds_and_little_memory(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "SECONDS", 0)  # up to one: the kernel counts whole seconds
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def outcome(source: str) -> str | None:
        try:
            return render(source)[:20]
        except StrettoError as error:
            return None if len(str(error)) < 1000 else str(error)

    with ThreadPoolExecutor(3) as threads:
        outcomes = dict(zip(names, threads.map(outcome, map(BOMBS.__getitem__, names)), strict=True))
    assert {name: text for name, text in outcomes.items() if text is not None} == {}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "more than 0 s"),
        ("{{ messages[0].content * 9999999999 }}", "more than 1,024 MiB"),
        ("{% for i in range(99) %}{{ 'a' * 999999 }}{% endfor %}", "longer than 64 MiB"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "not a valid template: it nests too deeply"),
        ("{% break %}", "not a valid template: 'break' outside loop"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recurses"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ raise_exception('not so') }}", "not so"),
        ("{{ messages[5].role }}", "no element 5"),
        ("{{ lipsum(9999) }}", "lipsum"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ '\\ud800' }}", "surrogate"),
    ],
)
def test_runaway_and_prying_templates_are_stopped(source: str, error: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chat_template, "SECONDS", 0)
    with pytest.raises(StrettoError, match=error):
        render(source)


def test_limits_hold_in_the_process(monkeypatch: pytest.MonkeyPatch):
    template = ChatTemplate(source="{{ messages[0].content }}")
    assert template.render(chat(1)).text == chat(1)[0]["content"]
    (process,) = template._idle
    place = Path(f"/proc/{process._process.pid}")
    limits = {
        line[:26].strip(): line[26:].split()[:2] for line in (place / "limits").read_text().splitlines()
    }
    assert limits["Max open files"] == limits["Max file size"] == limits["Max processes"] == ["0", "0"]
    assert limits["Max address space"] == [str(1 << 30)] * 2
    assert int(limits["Max cpu time"][0]) <= 7
    files = [os.readlink(file) for file in (place / "fd").iterdir()]
    assert [file.partition(":")[0] for file in files] == ["socket"] * 2
    assert b"HOME" not in (place / "environ").read_bytes()


def test_no_filter_needs_a_file_that_was_not_loaded():
    names = sorted(sandbox(datetime.now()).filters)
    cases = [
        f"{{% if messages[0].role == '{name}' %}}{{{{ messages[0].content | {name} }}}}{{% endif %}}"
        for name in names
    ]
    template = ChatTemplate(source="".join(cases))
    requests = [template_request([{"role": name, "content": "a &amp; <b>c</b>"}]) for name in names]
    answers = dict(zip(names, template.answers(requests), strict=True))
    assert {name: str(answer) for name, answer in answers.items() if "open files" in str(answer)} == {}
    plain = answers["striptags"]
    assert isinstance(plain, list)
    assert plain[0].text == "a & c"


def test_a_conversation_that_kills_its_process_costs_no_other(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chat_template, "SECONDS", 0)
    template = ChatTemplate(source="{{ 'a' * (messages[0].content | int) }}")
    counts = [3, 5, 1 << 40, 7, 1 << 40, 2]
    answers = list(template.answers([template_request([{"content": str(n)}]) for n in counts]))
    assert [len(answer[0].text) if isinstance(answer, list) else -1 for answer in answers] == [
        3,
        5,
        -1,
        7,
        -1,
        2,
    ]


def test_a_process_that_stops_or_dies_is_replaced(monkeypatch: pytest.MonkeyPatch):
    template = ChatTemplate(source="{{ messages[0].content }}")
    message = [{"role": "user", "content": "hi"}]
    template.render(message)
    (process,) = template._idle
    monkeypatch.setattr(chat_template, "PATIENCE_S", 0.3)
    process._socket.settimeout(0.3)
    process._process.send_signal(signal.SIGSTOP)
    with pytest.raises(StrettoError, match=r"does not end within 0 s"):
        template.render(message)
    assert process._process.returncode == -signal.SIGKILL
    monkeypatch.undo()
    assert template.render(message).text == "hi"
    (process,) = template._idle
    process._process.kill()
    process._process.wait()
    with pytest.raises(StrettoError, match="ended with SIGKILL"):
        template.render(message)
    assert template.render(message).text == "hi"


def test_answers_that_nobody_waits_for_are_not_taken_for_others():
    template = ChatTemplate(source="{{ messages[0].content }}")
    requests = [
        template_request([{"role": "user", "content": str(n)}]) for n in range(1000)
    ]  # more than one message of the process
    for answer in template.answers(requests):
        assert not isinstance(answer, StrettoError)
        assert answer[0].text == "0"
        assert template.render([{"content": "within"}]).text == "within"
        break
    assert template.render([{"content": "after"}]).text == "after"
    with ThreadPoolExecutor(4) as threads:
        wanted = [str(n) for n in range(40)]
        assert list(threads.map(lambda n: template.render([{"content": n}]).text, wanted)) == wanted


def test_a_fork_and_the_end_leave_no_process_behind():
    template = ChatTemplate(source="{{ messages[0].content }}")
    template.render(chat(1))
    (process,) = template._idle
    child = os.fork()
    if child == 0:  # its own process, and the end of this one's is not its
        text = template.render([{"content": "in a fork"}]).text
        template._idle.clear()
        os._exit(0 if text == "in a fork" else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert template.render([{"content": "here"}]).text == "here"
    assert template._idle == [process]
    del template
    process.stop()
    assert process._process.returncode == -signal.SIGKILL


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
    loaded = ChatTemplate.load(tmp_path / "kept")
    assert (loaded.render([]).text, loaded.render([], tools=[{}]).text) == ("d", "t")
    with pytest.raises(StrettoError, match="did you mean rag"):
        ChatTemplate.load(place, "rga")
    (place / "bad.jinja").write_text("{% for x in y %}")
    with pytest.raises(StrettoError, match=r"bad\.jinja: not a valid template: line 1"):
        ChatTemplate.load(place, str(place / "bad.jinja")).render([])
    (tmp_path / "nowhere").mkdir()
    assert ChatTemplate.find(tmp_path / "nowhere") is None
    with pytest.raises(StrettoError, match="has no chat template"):
        ChatTemplate.load(tmp_path / "nowhere")


def test_special_tokens_that_are_not_there_are_asked_for():
    source = "{% set unk_token = 'u' %}{{ unk_token }}{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    message = [{"content": "a"}]
    full = ChatTemplate(source=source, config={"bos_token": None, "eos_token": {"content": "</s>"}})
    assert full.render(message).text == "ua</s>"
    with pytest.raises(StrettoError, match="names eos_token, which"):
        ChatTemplate(source=source, config={"bos_token": None}).render(message)
    assert (
        ChatTemplate(source="{% if eos_token is defined %}{{ eos_token }}{% endif %}a").render([]).text == "a"
    )


def test_templates_that_ask_for_the_date_are_fingerprinted_by_day():
    assert ChatTemplate(source="{{ strftime_now('%Y') }}").key != ChatTemplate(source="x").key
    assert len(render("{{ strftime_now('%Y') }}")) == 4
