from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from chats import (
    BEGIN_END,
    SPECIAL,
    TEMPLATES,
    assistant,
    chat,
    tokenizer_folder,
    unmarked,
    user,
    write_chats,
)
from stretto.engine.models.language import IGNORED
from stretto.errors import StrettoError
from stretto.run.config.data import DataConfig, Packing, ReadOptions
from stretto.run.data.build import build
from stretto.run.data.chat_template import ChatTemplate
from stretto.run.data.dataset import DocumentSamples, WindowSamples, samples_of
from stretto.run.data.token_folder import TokenFolder

CHATS = {
    "plain": chat(1),
    "long": chat(4),
    "spaces": [user(" hi\n"), assistant("\n two  lines \n\n of\ttext 🙂")],
    "code": [user("```python\nx = {'a': 1}\n```"), assistant("{% raw %} {{ x }} <b>&amp;</b>")],
}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"a": "number"}}}]


def built(folder: Path, rows: list[dict[str, Any]], tokenizer: Path, **more: Any) -> TokenFolder:
    path, text = folder / "rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows)
    if not path.exists() or path.read_text() != text:  # its time is part of the fingerprint
        path.write_text(text)
    return build(path, folder / "tokens", tokenizer=tokenizer, replace=True, **{"chat": "assistant", **more})


def documents(folder: TokenFolder) -> list[tuple[list[int], list[int]]]:
    assert folder.mask is not None
    ends = folder.offsets.tolist()
    return [(folder.tokens[a:b].tolist(), folder.mask[a:b].tolist()) for a, b in pairwise(ends)]


def transformers_tokens(
    tokenizer: Path, messages: list[dict[str, Any]], **more: Any
) -> tuple[list[int], list[int]]:
    from transformers import PreTrainedTokenizerFast

    loaded = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    out = loaded.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True, **more)
    return out["input_ids"], out["assistant_masks"]


@pytest.mark.parametrize("style", TEMPLATES)
def test_tokens_and_masks_equal_transformers(tmp_path: Path, style: str):
    place = tokenizer_folder(tmp_path / style, style)
    folder = built(tmp_path, [{"messages": chat} for chat in CHATS.values()], place)
    folder.verify()
    assert documents(folder) == [transformers_tokens(place, chat) for chat in CHATS.values()]
    specials = {folder.tokenizer()._inner.token_to_id(token) for token in SPECIAL[style]}
    assert specials & set(documents(folder)[0][0])


def test_tools_system_and_arguments_equal_transformers(tmp_path: Path):
    place = tokenizer_folder(tmp_path / "llama3", "llama3")
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        user("1 + 1?"),
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "2", "name": "add"},
        assistant("2"),
    ]
    folder = built(tmp_path, [{"messages": messages, "tools": TOOLS, "id": 7}], place)
    assert documents(folder) == [transformers_tokens(place, messages, tools=TOOLS)]


@pytest.mark.parametrize("style", ["llama3", "mistral", "gemma", "chatml"])
def test_prefixes_tell_what_the_blocks_of_a_template_tell(tmp_path: Path, style: str):
    marked = tokenizer_folder(tmp_path / "marked", style)
    plain = tokenizer_folder(tmp_path / "plain", style, unmarked(TEMPLATES[style]))
    assert "generation" in ChatTemplate.load(marked).source
    assert "generation %}" not in ChatTemplate.load(plain).source
    rows = [{"messages": chat} for chat in CHATS.values()]
    for of_marked, other in zip(
        documents(built(tmp_path, rows, marked)), documents(built(tmp_path, rows, plain)), strict=True
    ):
        assert of_marked[0] == other[0]
        if style != "chatml":  # its block leaves the line end after a message out, and starts at one
            assert of_marked[1] == other[1]


def test_what_is_trained_is_what_the_assistant_says(tmp_path: Path):
    place = tokenizer_folder(tmp_path / "t", "gemma", unmarked(TEMPLATES["gemma"]))
    folder = built(tmp_path, [{"messages": chat(2)}], place)
    ((ids, mask),) = documents(folder)
    trained_text = folder.tokenizer().decode([i for i, on in zip(ids, mask, strict=True) if on], special=True)
    answers = [message["content"] for message in chat(2) if message["role"] == "assistant"]
    assert trained_text == "".join(f"{answer}<end_of_turn>\n" for answer in answers)
    ((_, every),) = documents(built(tmp_path, [{"messages": chat(1)}], place, chat="all"))
    assert all(every)


def test_weights_leave_messages_out(tmp_path: Path):
    messages = [user("a?"), assistant("first", weight=0), user("b?"), assistant("second", weight=1)]
    for template in (TEMPLATES["llama3"], unmarked(TEMPLATES["llama3"])):
        place = tokenizer_folder(tmp_path / "t", "llama3", template)
        folder = built(tmp_path, [{"messages": messages}], place)
        ((ids, mask),) = documents(folder)
        trained_text = folder.tokenizer().decode(
            [i for i, on in zip(ids, mask, strict=True) if on], special=True
        )
        assert trained_text == "second<|eot_id|>"


def test_prompts_and_completions(tmp_path: Path):
    place = tokenizer_folder(tmp_path / "t", "llama3")
    rows = [
        {"prompt": "2 + 2 =", "completion": " 4"},
        {"prompt": chat(1), "completion": [user("and?"), assistant("more")]},
        {"prompt": "no answer", "completion": ""},
    ]
    folder = built(tmp_path, rows, place)
    tokenizer = folder.tokenizer()
    texts = [
        (
            tokenizer.decode(ids, special=True),
            tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m], True),
        )
        for ids, mask in documents(folder)
    ]
    assert texts[0] == ("<|begin_of_text|>2 + 2 = 4<|eot_id|>", " 4<|eot_id|>")
    assert texts[1][1] == "more<|eot_id|>"
    assert texts[2][1] == "<|eot_id|>"
    (place / "tokenizer_config.json").unlink()  # roles need a template, texts do not
    assert documents(built(tmp_path, rows[:1], place))
    with pytest.raises(StrettoError, match="has no chat template"):
        built(tmp_path, rows[1:2], place)


@pytest.mark.parametrize(
    ("row", "error", "hint"),
    [
        ({"text": "a"}, "line 2: no field 'messages', only text", "messages"),
        ({"messages": []}, "line 2: messages is empty", "remove"),
        ({"messages": "a"}, "line 2: messages is not a list", "role"),
        ({"messages": [{"content": "a"}]}, r"messages\[0\]: no role", "roles are"),
        ({"messages": [{"role": "assistent", "content": ""}]}, r"messages\[0\]: role 'ass", "assistant?"),
        ({"messages": [{"role": "user"}]}, "no content", "text"),
        ({"messages": [{"role": "user", "content": 3}]}, "content is a int", "text"),
        ({"messages": [user("a"), assistant("b", function_call={})]}, "no longer in use", "tool_calls"),
        ({"messages": [user("a"), assistant("b", weight=0.5)]}, "weight 0.5", "0 "),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "part of type 'image'", "text"),
        ({"messages": [user("a")], "tools": {}}, "tools is not a list", "schemas"),
        ({"conversations": [{"from": "human", "value": "a"}]}, "ShareGPT", "messages"),
        ({"messages": [assistant("b"), user("a")]}, "line 2: .*roles must alternate", "order"),
    ],
)  # fmt: skip
def test_bad_rows_are_named(tmp_path: Path, row: dict[str, Any], error: str, hint: str):
    place = tokenizer_folder(tmp_path / "t", "mistral")
    with pytest.raises(StrettoError, match=error) as caught:
        built(tmp_path, [{"messages": chat(1)}, row], place)
    assert hint in (caught.value.hint or "")


def test_turns_that_a_template_renders_otherwise_later_are_samples_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    forgetful = """{% for m in messages %}<|im_start|>{{ m.role }}:
{%- if m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content }}<|im_end|>{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant:{% endif %}"""
    place = tokenizer_folder(tmp_path / "t", "chatml", forgetful)
    folder = built(tmp_path, [{"messages": chat(2)}, {"messages": chat(1)}], place)
    assert "note: 1 conversations are 2 samples" in capsys.readouterr().err
    tokenizer = folder.tokenizer()
    texts = [
        (
            tokenizer.decode(ids, special=True),
            tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m], True),
        )
        for ids, mask in documents(folder)
    ]
    answers = [f"<think></think>{chat(2)[i]['content']}<|im_end|>" for i in (1, 3)]
    assert [trained_text for _, trained_text in texts] == [answers[0], answers[1], answers[0]]
    assert texts[0] == texts[2]
    assert texts[1][0].count("<think>") == 1
    built(tmp_path, [{"messages": chat(2)}], place, chat="all")


ENDED = "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize(
    ("template", "messages", "error"),
    [
        (ENDED + "{{ messages | length }}", chat(1), "what message 2 adds cannot be told"),
        (
            "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}",
            chat(1),
            "nothing tells the model to end message 2",
        ),
        (ENDED, [user("a"), assistant("b", reasoning_content="c!")], "message 2 says 'c!', which"),
        (ENDED, [user("a"), assistant("b", tool_calls=[{"name": "add"}])], "message 2 says 'add', which"),
        (ENDED.replace("m.content", "m.content[:3]"), chat(1), "message 2 says 'answer 0 .*, which"),
        (
            "<|im_start|>{% generation %}a{% endgeneration %}",
            chat(2),
            "2 messages of the assistant, 2 .* marks 1 blocks",
        ),
        ("<|im_start|>{% generation %}a{% endgeneration %}", chat(1), "message 2 says 'answer 0"),
    ],
)
def test_what_cannot_be_aligned_is_refused_with_its_turn(
    tmp_path: Path, template: str, messages: list[dict[str, Any]], error: str
):
    place = tokenizer_folder(tmp_path / "t", "chatml", template)
    with pytest.raises(StrettoError, match=f"line 1: .*{error}") as caught:
        built(tmp_path, [{"messages": messages}], place)
    assert "generation" in (caught.value.hint or "")
    built(tmp_path, [{"messages": messages}], place, chat="all")


def test_rows_that_cannot_be_marked_are_left_out_and_counted_if_asked(tmp_path: Path):
    place = tokenizer_folder(tmp_path / "t", "chatml", ENDED)
    good = [{"messages": chat(1 + i % 3)} for i in range(40)]
    bad = [{"messages": [user("a"), assistant("b", thinking="hm")]}, {"messages": []}]
    rows = [*good[:20], bad[0], *good[20:], bad[1]]
    folder = built(tmp_path, rows, place, reading=ReadOptions(on_error="skip"))
    assert folder.index.documents == 40
    assert folder.index.bad_rows is not None
    assert folder.index.bad_rows["skipped"] == {"not aligned with the template": 1, "no conversation": 1}
    assert any("line 21: " in example for example in folder.index.bad_rows["examples"])
    with pytest.raises(StrettoError, match="more than 10%"):
        built(tmp_path, [*good[:5], *bad], place, reading=ReadOptions(on_error="skip"))


def test_conversations_without_an_answer_are_counted(tmp_path: Path):
    place = tokenizer_folder(tmp_path / "t", "llama3")
    folder = built(tmp_path, [{"messages": [user("hello?")]}, {"messages": chat(1)}], place)
    assert (folder.index.documents, folder.index.blank) == (1, 1)
    with pytest.raises(StrettoError, match="no conversation with a token to train on"):
        built(tmp_path, [{"messages": [user("hello?")]}], place)


def test_a_folder_with_a_mask_is_of_another_version_and_any_change_is_another_key(tmp_path: Path):
    place = tokenizer_folder(tmp_path / "t", "llama3")
    rows = [{"messages": chat(2)}]
    folder = built(tmp_path, rows, place)
    assert json.loads((folder.path / "index.json").read_text())["version"] == 2
    key = folder.index.key
    assert TokenFolder(folder.path).index.trained == sum(documents(folder)[0][1])
    assert built(tmp_path, rows, place, chat="all").index.key != key
    assert ChatTemplate.load(folder.path).source == TEMPLATES["llama3"]
    (tmp_path / "other.jinja").write_text(TEMPLATES["llama3"] + " ")
    assert built(tmp_path, rows, place, chat_template=str(tmp_path / "other.jinja")).index.key != key
    assert built(tmp_path, rows, place).index.key == key
    data = bytearray((folder.path / "mask.bin").read_bytes())
    data[5] ^= 1
    (folder.path / "mask.bin").write_bytes(data)
    with pytest.raises(StrettoError, match=r"mask.bin: corrupt"):
        TokenFolder(folder.path)


# ---------------------------------------------------------------------- samples


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> TokenFolder:
    folder = tmp_path_factory.mktemp("chats")
    place = tokenizer_folder(folder / "t", "llama3")
    rows = write_chats(folder / "c.jsonl", [chat(1 + i % 5, f"question {i}") for i in range(60)])
    return build(rows, folder / "tokens", tokenizer=place, chat="assistant")


def expected(ids: list[int], mask: list[int], sequence: int, pad: int) -> tuple[list[int], list[int]]:
    targets = [token if on else IGNORED for token, on in zip(ids[1:], mask[1:], strict=True)][:sequence]
    inputs = ids[:-1][:sequence]
    missing = sequence - len(inputs)
    return inputs + [pad] * missing, targets + [IGNORED] * missing


@pytest.mark.parametrize("sequence", [64, 4096])
def test_each_sample_is_one_conversation(chats: TokenFolder, sequence: int):
    samples = DocumentSamples(chats, "train", sequence, shuffle=False, ratio="1,0,0")
    assert (samples.total, len(samples)) == (60, 60)
    batch = samples.batch(range(60))
    inputs, targets = batch.inputs, batch.targets
    for row, (ids, mask) in enumerate(documents(chats)):
        assert (inputs[row].tolist(), targets[row].tolist()) == expected(
            ids, mask, sequence, chats.index.endoftext
        )
    assert samples.too_long == sum(len(ids) > sequence + 1 for ids, _ in documents(chats))
    shuffled = DocumentSamples(chats, "train", sequence, seed=1, ratio="1,0,0").batch(range(60)).inputs
    assert sorted(shuffled.tolist()) == sorted(inputs.tolist())
    assert shuffled.tolist() != inputs.tolist()


def test_long_conversations_are_dropped_by_choice_and_those_without_a_target_always(chats: TokenFolder):
    dropping = DocumentSamples(chats, "train", 200, ratio="1,0,0", drop=True)
    fits = [ids for ids, _ in documents(chats) if len(ids) <= 201]
    assert 0 < len(dropping) == len(fits) < 60
    assert dropping.too_long == 60 - len(fits)
    short = DocumentSamples(chats, "train", 51, ratio="1,0,0")  # ends within some of the first questions
    beginnings = [mask[1:52] for _, mask in documents(chats)]
    assert short.untrained == sum(not any(mask) for mask in beginnings) > 0
    assert bool(((short.batch(range(len(short))).targets != IGNORED).sum(1) > 0).all())
    with pytest.raises(StrettoError, match="no other has a token to train on"):
        DocumentSamples(chats, "train", 5, ratio="1,0,0")


def test_splits_share_no_conversation(chats: TokenFolder):
    splits = [
        DocumentSamples(chats, name, 4096, ratio="6,3,1", shuffle=False)
        for name in ("train", "valid", "test")
    ]
    assert sum(map(len, splits)) == 60
    assert all(len(split) > 3 for split in splits)


def test_packed_conversations_fill_windows(chats: TokenFolder):
    packed = samples_of(chats, DataConfig(chat="assistant", packing="stream", sequence=60), "train", seed=0)
    assert isinstance(packed, WindowSamples)
    batch = packed.batch([3, 5])
    inputs, targets = batch.inputs, batch.targets
    assert chats.mask is not None
    for row, start in enumerate(packed.starts([3, 5]).tolist()):
        assert inputs[row].tolist() == chats.tokens[start : start + 60].tolist()
        window = chats.mask[start + 1 : start + 61].astype(bool)
        assert torch.equal(targets[row] != IGNORED, torch.from_numpy(window))
    assert isinstance(samples_of(chats, DataConfig(sequence=60), "train", seed=0), DocumentSamples)


@pytest.mark.parametrize("packing", ["none", "stream"])
def test_an_evaluation_reads_each_target_once(chats: TokenFolder, packing: Packing):
    data = DataConfig(packing=packing, sequence=400, split="1,1,1")
    splits = [samples_of(chats, data, name, once=True) for name in ("train", "valid", "test", "all")]
    counts = [int((split.batch(range(len(split) + 3)).targets != IGNORED).sum()) for split in splits]
    assert chats.mask is not None
    assert counts[3] == sum(counts[:3]) == int(chats.mask.sum())
    assert all(split.targets(3) is None for split in splits)


def test_text_can_be_one_document_a_sample_too(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": f"line {i} " * i}) + "\n" for i in range(1, 9))
    )
    folder = build(tmp_path / "a.jsonl", tmp_path / "tokens", vocab=300)
    data = DataConfig(packing="none", sequence=400, split="1,0,0")
    targets = samples_of(folder, data, "train", seed=0, shuffle=False).batch([0]).targets
    length = int(folder.offsets[1])
    assert targets[0, length - 2] == folder.index.endoftext
    assert bool((targets[0, length - 1 :] == IGNORED).all())
    with pytest.raises(StrettoError, match="holds the tokens of text"):
        samples_of(folder, DataConfig(chat="assistant"), "train", seed=0)


assert BEGIN_END.keys() == SPECIAL.keys() == TEMPLATES.keys()
