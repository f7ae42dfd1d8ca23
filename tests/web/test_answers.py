"""The protocol of the page: questions and replies as lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from stretto.program import names
from stretto.web.answers import Question, reply_lines


def replies(text: str, **more: Any) -> list[Any]:
    return [json.loads(line) for line in reply_lines(text, **more)]


def test_an_answer_is_one_line() -> None:
    (reply,) = replies('{"ask": "schedules"}')
    assert [each["name"] for each in reply["answer"]["schedules"]] == [*names()]


def test_the_last_part_is_the_answer() -> None:
    def count(question: Question) -> Iterator[dict[str, Any]]:
        for number in range(question["to"]):
            yield {"count": number}

    lines = replies('{"ask": "count", "to": 2}', questions={"count": count})
    assert lines == [{"part": {"count": 0}}, {"part": {"count": 1}}, {"answer": None}]


def test_errors_have_a_message_and_a_hint() -> None:
    (reply,) = replies('{"ask": "timelin"}')
    assert "'timelin'" in reply["error"]["message"]
    assert "timeline" in reply["error"]["hint"]
    (reply,) = replies('{"ask": "timeline", "programs": [{"name": "1f1", "ranks": 2, "microbatches": 2}]}')
    assert "1f1" in reply["error"]["message"]


def test_an_error_that_nobody_expected_is_an_answer_too(capsys: pytest.CaptureFixture[str]) -> None:
    (reply,) = replies('{"ask": "timeline"}')
    assert reply["error"]["message"] == "KeyError: 'programs'"
    assert "in replay" in capsys.readouterr().err
    plan = {"ask": "plan", "model": "gpt2", "cluster": "dgx-h100:8", "batch": 8, "software": "megatron"}
    (reply,) = replies(json.dumps(plan))
    assert "'megatron'" in reply["error"]["message"]
    assert "tuned" in reply["error"]["hint"]


def test_a_replay_says_what_a_picture_needs() -> None:
    programs = [{"name": "zb-v", "ranks": 4, "microbatches": 8}]
    (reply,) = replies(json.dumps({"ask": "timeline", "programs": programs}))
    answer = reply["answer"]
    assert answer["timelines"]["panels"][0]["last"] == 25.5
    assert answer["table"][1][2] == "5.9%"
