"""Chat templates as models and trainers ship them: texts as of transformers, and masks over many turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from chats import assistant, user
from published_files import published
from stretto.run.data.chat_template import ChatTemplate, Rendered
from stretto.run.data.conversation import Conversation, mark, parse_row
from stretto.run.data.row_errors import RowError

SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>"}
TURNS = [
    {"role": "system", "content": "Be brief."},
    user("1 + 1?"),
    assistant("two"),
    user("<b>And</b> 2 + 2?"),
    assistant("<think>\n4, as I know\n</think>\n\nfour"),
    user("Sure?"),
    assistant("<think>\nit is\n</think>\n\n<i>Sure.</i>"),
]
PLAIN = [{**message, "content": message["content"].rpartition("</think>\n\n")[2]} for message in TURNS]
LLAMA_CPP, TRL = "llama-cpp-python/", "trl/"
# Template, whether the conversation has thoughts, what opens and ends the assistant's turn (as a person reads
# the template), and how many samples the conversation makes.
READ = [
    (LLAMA_CPP + "ByteDance-Seed-OSS", False, "<seed:bos>assistant\n", "<seed:eos>", 1),
    (LLAMA_CPP + "GLM-4.6", False, "<|assistant|>", "<|user|>", 1),
    (LLAMA_CPP + "GLM-4.6", True, "<|assistant|>", "<|user|>", 2),
    (LLAMA_CPP + "HuggingFaceTB-SmolLM3-3B", False, "<|im_start|>assistant\n", "<|im_end|>\n", 1),
    (LLAMA_CPP + "HuggingFaceTB-SmolLM3-3B", True, "<|im_start|>assistant\n", "<|im_end|>\n", 1),
    (LLAMA_CPP + "Kimi-K2-Instruct", False, "<|im_assistant|>assistant<|im_middle|>", "<|im_end|>", 1),
    (LLAMA_CPP + "MiniMax-M2", True, "]~b]ai\n", "[e~[\n", 2),
    (LLAMA_CPP + "Qwen-QwQ-32B", True, "<|im_start|>assistant\n", "<|im_end|>\n", 2),
    (LLAMA_CPP + "Qwen-Qwen3-0.6B", False, "<|im_start|>assistant\n", "<|im_end|>\n", 3),
    (LLAMA_CPP + "Qwen-Qwen3-0.6B", True, "<|im_start|>assistant\n", "<|im_end|>\n", 3),
    (LLAMA_CPP + "Qwen3.5-4B", True, "<|im_start|>assistant\n", "<|im_end|>\n", 3),
    (LLAMA_CPP + "deepseek-ai-DeepSeek-V3.1", False, "<think></think>", "<｜end▁of▁sentence｜>", 1),
    (LLAMA_CPP + "meta-llama-Llama-3.1-8B-Instruct", False, "<|end_header_id|>\n\n", "<|eot_id|>", 1),
    (LLAMA_CPP + "mistralai-Mistral-Nemo-Instruct-2407", False, "[/INST]", "<eos>", 1),
    (LLAMA_CPP + "openai-gpt-oss-120b", False, "<|start|>assistant", "<|return|>", 3),
    (LLAMA_CPP + "tencent-Hy3", False, "<think:opensource></think:opensource>", "<｜hy_eos:opensource｜>", 1),
    (TRL + "deepseek_r1_distill", False, "<｜Assistant｜>", "<｜end▁of▁sentence｜>", 1),
    (TRL + "gemma3", False, "<start_of_turn>model\n", "<end_of_turn>\n", 1),
    (TRL + "phi3_5", False, "<|assistant|>\n", "<|end|>\n<eos>", 3),
    (TRL + "qwen2_5", False, "<|im_start|>assistant\n", "<|im_end|>\n", 1),
]  # fmt: skip
PAIRS = (
    *(
        "cohere",
        "cohere2",
        "deepseekv3",
        "gemma",
        "gemma3",
        "glm4moe",
        "lfm2_v2",
        "llama3",
        "nemotron_3_nano",
    ),
    *("phi3", "phi3_5", "qwen2_5", "qwen3_instruct_2507"),
)


def template(name: str) -> ChatTemplate:
    return ChatTemplate(source=published(f"{name}.jinja").read_text(encoding="utf-8"), config=SPECIAL)


def marked(name: str, messages: Sequence[Any]) -> list[Rendered] | RowError:
    row = parse_row({"messages": messages}, "row")
    assert isinstance(row, Conversation)
    (answer,) = mark([row], template(name), "assistant")
    return answer


def rendered_by_transformers(
    name: str, messages: Sequence[Any], prompt: bool = False, mask: bool = False
) -> tuple[str, list[tuple[int, int]]]:
    from transformers.utils.chat_template_utils import render_jinja_template

    render: Any = render_jinja_template
    texts, spans = render(
        conversations=[list(messages)],
        chat_template=published(f"{name}.jinja").read_text(encoding="utf-8"),
        add_generation_prompt=prompt,
        return_assistant_tokens_mask=mask,
        **SPECIAL,
    )
    return texts[0], spans[0] if mask else []


def of_family(name: str, messages: Sequence[Any]) -> list[Any]:
    """The messages without the system's, if a template has none or (Nemo) drops it once an answer follows."""
    return list(messages[1:] if name.endswith(("gemma", "Nemo-Instruct-2407")) else messages)


@pytest.mark.parametrize(("name", "thoughts", "opening", "end", "samples"), READ)
def test_each_turn_is_trained_on_once_as_the_model_would_write_it(
    name: str, thoughts: bool, opening: str, end: str, samples: int
):
    messages = of_family(name, TURNS if thoughts else PLAIN)
    answer = marked(name, messages)
    assert isinstance(answer, list), answer
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    written = [
        (rendered.text[:a], rendered.text[a:b], i)
        for i, rendered in enumerate(answer)
        for a, b in rendered.spans
    ]
    assert (len(answer), len(written)) == (samples, len(turns))
    for turn, (before, trained, _) in zip(turns, written, strict=True):
        start = before.removesuffix("<think>\n")  # which some templates ask with
        assert start.endswith(opening)
        assert trained.endswith(end)
        assert trained.count(end) == 1
        for piece in messages[turn]["content"].replace("</think>", "<think>").split("<think>"):
            assert piece.strip() in trained
        assert rendered_by_transformers(name, messages[: turn + 1])[0] in (
            before + trained,
            before + trained.removesuffix(end),  # which it writes only once another turn follows
        )
        prompt = rendered_by_transformers(name, messages[:turn], prompt=True)[0]
        assert prompt.startswith(start.removesuffix("<think>"))
        assert len(prompt) <= len(start) + len("<think>\n</think>")
    assert answer[-1].text.removesuffix(end) == rendered_by_transformers(name, messages)[0].removesuffix(end)


# marked as others of their family are
ALIKE = {"cohere2", "gemma", "phi3", "qwen2_5"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in ALIKE else []) for name in PAIRS]
)
def test_masks_equal_those_of_transformers_on_the_marked_template(name: str):
    messages = of_family(name, PLAIN)
    text, spans = rendered_by_transformers(f"{TRL}{name}_training", messages, mask=True)
    answer = marked(f"{TRL}{name}_training", messages)
    assert isinstance(answer, list)
    assert answer == [Rendered(text, tuple(spans))]
    plain = marked(f"{TRL}{name}", messages)
    assert isinstance(plain, list)
    trained_texts = [rendered.text[a:b].strip() for rendered in plain for a, b in rendered.spans]
    expected_texts = [text[a:b].strip() for a, b in spans if text[a:b] != "<eos>"]
    openings = ("<｜Assistant｜>", "<think>")  # trl trains on them, too
    for trained, expected in zip(trained_texts, expected_texts, strict=True):
        assert trained.removesuffix("<eos>").strip() in (expected, *map(expected.removeprefix, openings))


@pytest.mark.parametrize(
    ("name", "messages", "why"),
    [
        (TRL + "deepseek_r1_distill", TURNS, "message 7 says 'it is', which the template leaves out"),
        (TRL + "llama3", [user("a"), assistant("b", reasoning_content="c!")], "message 2 says 'c!'"),
        (
            TRL + "llama3_1",
            [user("a"), assistant("Look:", tool_calls=[{"function": {"name": "f", "arguments": {}}}])],
            "message 2 says 'Look:', which",
        ),
        (
            TRL + "phi3",
            [user("a"), assistant("", tool_calls=[{"function": {"name": "f!", "arguments": {}}}])],
            "message 2 says 'f!', which",
        ),
        (LLAMA_CPP + "mistralai-Mistral-Nemo-Instruct-2407", PLAIN, "message 7 adds cannot be told"),
        (
            LLAMA_CPP + "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
            PLAIN[:3],
            "message 3 adds cannot be told",
        ),
    ],
)
def test_templates_that_would_lose_or_misplace_a_turn_are_refused(
    name: str, messages: Sequence[Any], why: str
):
    answer = marked(name, messages)
    assert isinstance(answer, RowError)
    assert why in answer.message


def test_tool_calls_and_thoughts_of_one_answer_stay_together():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        *(user("1 + 1?"), assistant("", tool_calls=[call], reasoning_content="add them")),
        *({"role": "tool", "content": "2"}, assistant("two", reasoning_content="so it is")),
        *(user("more"), assistant("done", reasoning_content="enough")),
    ]
    answer = marked(LLAMA_CPP + "Qwen-Qwen3-0.6B", messages)
    assert isinstance(answer, list)
    trained_texts = [[rendered.text[a:b] for a, b in rendered.spans] for rendered in answer]
    called = (
        '<think>\nadd them\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    )
    assert trained_texts == [
        [f"{called}<|im_end|>\n", "<think>\nso it is\n</think>\n\ntwo<|im_end|>\n"],
        ["<think>\nenough\n</think>\n\ndone<|im_end|>\n"],
    ]
    assert answer[0].text == rendered_by_transformers(LLAMA_CPP + "Qwen-Qwen3-0.6B", messages[:4])[0]
