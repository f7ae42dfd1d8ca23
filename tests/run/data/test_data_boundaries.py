"""The tokens that end and begin texts come from the files of the tokenizer's model."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, processors

from published_files import published
from stretto.errors import StrettoError
from stretto.run.config.data import DataConfig
from stretto.run.data import readers
from stretto.run.data.boundaries import Boundaries, ModelFiles, find_boundaries
from stretto.run.data.build import build, build_megatron
from stretto.run.data.open import open_source, open_tokens
from stretto.run.data.tokenizer import Tokenizer

SPECIAL = ("<bos>", "<eos>", "<turn>", "<pad>", "<|endoftext|>")


def word_tokenizer(
    *special: str, before: str | None = None, after: str | None = None
) -> tokenizers.Tokenizer:
    """A tokenizer of words with these special tokens from id 4, and perhaps a template with two of them."""
    inner = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2, "</s>": 3}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens([*special])
    if before or after:
        used = [(text, inner.token_to_id(text)) for text in (before, after) if text]
        single = " ".join(part for part in (before, "$A", after) if part)
        inner.post_processor = processors.TemplateProcessing(single=single, special_tokens=used)
    return inner


def model(folder: Path, inner: tokenizers.Tokenizer, **files: object) -> Path:
    """A folder of a model: `tokenizer.json`, and the others by their names without `.json`."""
    folder.mkdir(exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


TURNS = {"eos_token": "<turn>", "chat_template": "{{ m }}<turn>"}


@pytest.mark.parametrize(
    ("files", "end"),
    [
        ({"tokenizer_config": {"eos_token": "<eos>"}}, "<eos>"),
        ({"tokenizer_config": {"eos_token": {"content": "<eos>", "lstrip": False}}}, "<eos>"),
        ({"tokenizer_config": {"eos_token": None}, "special_tokens_map": {"eos_token": "<eos>"}}, "<eos>"),
        ({"generation_config": {"eos_token_id": 5}}, "<eos>"),
        ({"config": {"text_config": {"eos_token_id": [5]}}}, "<eos>"),
        # a chat model's own ends a turn; its list has the other
        ({"tokenizer_config": TURNS, "generation_config": {"eos_token_id": [5, 6]}}, "<eos>"),
        ({"tokenizer_config": TURNS, "config": {"eos_token_id": [6, 5]}}, "<eos>"),
        # an id that is text ends none, as of a class's own eos_token_id
        ({"config": {"eos_token_id": 2}, "tokenizer_config": {"eos_token": "<eos>"}}, "<eos>"),
    ],
)
def test_the_end_of_text_is_what_the_files_name(tmp_path: Path, files: dict[str, object], end: str) -> None:
    loaded = Tokenizer.load(model(tmp_path, word_tokenizer(*SPECIAL[:3]), **files))
    assert loaded.text_of(loaded.endoftext) == end


@pytest.mark.parametrize(
    ("special", "files", "error"),
    [
        (SPECIAL[:3], {}, "has no end-of-text token that the model's files name"),  # `</s>` is but a word
        (SPECIAL[:3], {"tokenizer_config": TURNS}, r"files agree on; in question: <turn> \(6\)"),
        (
            SPECIAL[:3],
            {"tokenizer_config": {"eos_token": "<eos>"}, "generation_config": {"eos_token_id": 4}},
            r"in question: <eos> \(5\), <bos> \(4\)",
        ),
        (SPECIAL, {"tokenizer_config": {"eos_token": "<eos>"}}, r"<eos> \(5\), <\|endoftext\|> \(8\)"),
        (SPECIAL, {"tokenizer_config": {"eos_token": "<none>"}}, "has eos_token '<none>', and the tokenizer"),
        (SPECIAL, {"tokenizer_config": [1]}, r"tokenizer_config\.json: not a JSON object"),
    ],
)
def test_what_they_do_not_name_is_asked_for(
    tmp_path: Path, special: tuple[str, ...], files: dict[str, object], error: str
) -> None:
    folder = model(tmp_path / "model", word_tokenizer(*special), **files)
    with pytest.raises(StrettoError, match=error):
        _ = Tokenizer.load(folder).endoftext
    text = tmp_path / "text.txt"
    text.write_text("a b")
    with pytest.raises(StrettoError, match=error) as caught:
        build(text, tmp_path / "out", tokenizer=folder)
    assert not (tmp_path / "out").exists()
    if "JSON" not in error:
        assert "--end-of-text TOKEN" in str(caught.value.hint)
        folder = build(text, tmp_path / "out", tokenizer=folder, end_of_text="5", begin_of_text="").path
        assert open_tokens(str(folder)).tokens[:].tolist() == [1, 2, 5]


def test_conversations_end_with_their_turns(tmp_path: Path) -> None:
    folder = model(tmp_path, word_tokenizer(*SPECIAL[:3]), tokenizer_config=TURNS)
    assert Tokenizer.load(folder, chat=True).endoftext == 6


@pytest.mark.parametrize(
    ("around", "config", "begin"),
    [
        ({}, {}, None),
        ({}, {"bos_token": "<bos>"}, None),  # named, and never put before a text, as gpt-oss's
        ({"before": "<bos>"}, {}, "<bos>"),
        ({"before": "<bos>", "after": "<eos>"}, {}, "<bos>"),
        ({"after": "<eos>"}, {}, None),
        ({}, {"bos_token": "<bos>", "add_bos_token": True}, "<bos>"),
        ({}, {"bos_token": "<bos>", "add_bos_token": False, "chat_template": "{{ bos_token }}"}, None),
        ({}, {"bos_token": "<bos>", "chat_template": "{{ bos_token }}"}, "<bos>"),
        ({}, {"bos_token": "<bos>", "chat_template": "<bos>"}, None),
        ({}, {"bos_token": "<bos>", "tokenizer_class": "LlamaTokenizerFast"}, "<bos>"),
    ],
)
def test_the_begin_of_text(
    tmp_path: Path, around: dict[str, str], config: dict[str, object], begin: str | None
) -> None:
    folder = model(
        tmp_path, word_tokenizer(*SPECIAL[:3], **around), tokenizer_config={"eos_token": "<eos>", **config}
    )
    loaded = Tokenizer.load(folder)
    assert [loaded.text_of(token) for token in loaded.begin] == ([] if begin is None else [begin])


def test_a_begin_of_text_that_is_denied_or_several_is_asked_for(tmp_path: Path) -> None:
    config: dict[str, Any] = {"eos_token": "<eos>", "add_bos_token": False}
    folder = model(tmp_path, word_tokenizer(*SPECIAL[:4], before="<bos>"), tokenizer_config=config)
    with pytest.raises(StrettoError, match=r"no begin-of-text .* in question: <bos> \(4\)") as caught:
        _ = Tokenizer.load(folder).begin
    assert "or as an empty text" in str(caught.value.hint)
    assert Tokenizer.load(folder, begin="").begin == []
    assert Tokenizer.load(folder, begin="<pad>").begin == [7]


@given(ids=st.lists(st.sampled_from([4, 5, 6])), named=st.sampled_from([None, *SPECIAL[:3]]), turns=...)
def test_no_other_token_than_the_files_name_ends_a_text(
    ids: list[int], named: str | None, turns: bool
) -> None:
    """Whatever they name: the end is one of these, and the only one but for the turn; else it is an error."""
    inner = word_tokenizer(*SPECIAL[:3])
    config = {} if named is None else {"eos_token": named}
    files = ModelFiles(config, {"eos_token_id": ids}, "<turn>" if turns else "")
    mentioned = {*ids, *(() if named is None else [inner.token_to_id(named)])}
    left = mentioned - ({6} if turns else set())
    if len(left) == 1:
        assert find_boundaries(inner, "t", files).end in left
    else:
        with pytest.raises(StrettoError, match="has no end-of-text token"):
            find_boundaries(inner, "t", files)


@pytest.mark.parametrize(
    ("token", "error"),
    [
        ("<oes>", r"data\.end_of_text is '<oes>': .* no such token"),
        ("99", "9 tokens and none with this id"),
        (-1, "none with this id"),
        ("", "no such token"),
        ("\ud800", "no such token"),
    ],
)
def test_a_token_that_is_not_there(tmp_path: Path, token: str | int, error: str) -> None:
    folder = model(tmp_path, word_tokenizer(*SPECIAL))
    with pytest.raises(StrettoError, match=error) as caught:
        _ = Tokenizer.load(folder, end=token).endoftext
    assert "<eos>" in str(caught.value.hint)


def test_documents_begin_and_end_and_folders_keep_both(tmp_path: Path) -> None:
    """In a token folder and a Megatron dataset, of which the tokenizer is read again."""
    folder = model(
        tmp_path / "model",
        word_tokenizer(*SPECIAL[:3], before="<bos>"),
        tokenizer_config={"eos_token": "<eos>"},
    )
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "a b"}\n{"text": "b"}\n')
    tokens = build(text, tmp_path / "tokens", tokenizer=folder)
    dataset = build_megatron(text, tmp_path / "dataset", tokenizer=folder)
    again = [open_tokens(str(tmp_path / name)) for name in ("tokens", "dataset")]
    for source in (tokens, dataset, *again):
        assert source.tokens[0 : source.size].tolist() == [4, 1, 2, 5, 4, 2, 5]
        assert (source.endoftext, source.begin_of_text) == (5, 4)
        assert source.describe_boundaries() == "texts end with <eos> (5) and begin with <bos> (4)"
        assert source.tokenizer().boundaries == Boundaries(5, 4)
        for name, content in source.companions().items():
            (tmp_path / name).write_bytes(content)
        assert Tokenizer.load(tmp_path / "tokenizer.json").boundaries == Boundaries(5, 4)
    assert json.loads((tmp_path / "tokens" / "index.json").read_text())["begin_of_text"] == 4
    # a dataset at a URL has its tokenizer beside it too
    data = DataConfig(source=(tmp_path / "dataset").as_uri(), cache=str(tmp_path / "cache"))
    assert open_source(data).describe_boundaries() == tokens.describe_boundaries()
    # another choice is other tokens, and is compared with those of a folder
    other = build(text, tmp_path / "tokens", tokenizer=folder, end_of_text=6, begin_of_text="")
    assert other.tokens[:].tolist() == [1, 2, 6, 2, 6]
    data = DataConfig(source=str(tmp_path / "tokens"), end_of_text="<turn>")
    assert open_source(data).endoftext == 6
    with pytest.raises(
        StrettoError, match=r"texts end with <turn> \(6\), and the config says .* <eos> \(5\)"
    ):
        open_source(replace(data, end_of_text="<eos>"))


@pytest.mark.parametrize("form", ["folder", "megatron"])
def test_a_long_document_begins_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """It comes in pieces."""
    monkeypatch.setattr(readers, "PIECE", 700)
    text = tmp_path / "text.txt"
    text.write_text("some words\n" * 500)
    Tokenizer.train(["some words\n" * 9], 300).save(tmp_path / "tokenizer.json")
    trained = Tokenizer.load(tmp_path / "tokenizer.json")
    begin = trained.encode("a")[0]
    how: dict[str, Any] = {"tokenizer": tmp_path / "tokenizer.json", "begin_of_text": begin}
    source = (build if form == "folder" else build_megatron)(text, tmp_path / "out", **how)
    ids = source.tokens[0 : source.size].tolist()
    assert ids == [begin, *trained.encode(text.read_text()), trained.endoftext]


def test_a_mixture_tokenises_its_text_as_its_tokens_are(tmp_path: Path) -> None:
    folder = model(tmp_path / "model", word_tokenizer(*SPECIAL[:3]))
    (tmp_path / "text.txt").write_text("a b")
    build(tmp_path / "text.txt", tmp_path / "tokens", tokenizer=folder, end_of_text=6, begin_of_text=4)
    weights = {str(tmp_path / "tokens"): 1.0, str(tmp_path / "text.txt"): 1.0}
    mixed = open_source(DataConfig(source=weights, cache=str(tmp_path / "cache")))
    assert [stream.tokens[0 : stream.size].tolist() for stream in mixed.streams.values()] == [
        [4, 1, 2, 6]
    ] * 2
    assert (mixed.endoftext, mixed.begin_of_text) == (6, 4)


def published_model(tmp_path: Path, name: str, **files: object) -> Path:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(published(f"{name}/{file}"), tmp_path / file)
    for file, content in files.items():
        (tmp_path / f"{file}.json").write_text(json.dumps(content))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "eos_token_id", "end", "begin"),
    [
        pytest.param("lenml-gemma3", [1, 106], "<eos>", "<bos>", marks=pytest.mark.slow),
        pytest.param("lenml-llama3", None, "<|end_of_text|>", "<|begin_of_text|>", marks=pytest.mark.slow),
        pytest.param(
            "lenml-llama3_1",
            [128001, 128008, 128009],
            "<|end_of_text|>",
            "<|begin_of_text|>",
            marks=pytest.mark.slow,
        ),
        ("lenml-llama2", None, "</s>", "<s>"),
        ("lenml-qwen3", [151645, 151643], "<|endoftext|>", None),
        pytest.param("lenml-gptoss", [200002, 199999, 200012], "<|endoftext|>", None, marks=pytest.mark.slow),
        ("lenml-deepseek_v3", 1, "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>"),
        ("lenml-claude", None, "<EOT>", None),
    ],
)
def test_published_models(
    tmp_path: Path, name: str, eos_token_id: object, end: str, begin: str | None
) -> None:
    files = {} if eos_token_id is None else {"generation_config": {"eos_token_id": eos_token_id}}
    loaded = Tokenizer.load(published_model(tmp_path, name, **files))
    assert loaded.text_of(loaded.endoftext) == end
    assert [loaded.text_of(token) for token in loaded.begin] == ([] if begin is None else [begin])


@pytest.mark.slow  # reads 33 MB twice; small tokenizers ask above
def test_gemma_without_its_generation_config_asks(tmp_path: Path) -> None:
    """Its `</s>` (212) is a tag of HTML, and `<end_of_turn>` ends no document."""
    folder = published_model(tmp_path, "lenml-gemma3")
    with pytest.raises(StrettoError, match=r"in question: <end_of_turn> \(106\)"):
        _ = Tokenizer.load(folder).endoftext
    assert Tokenizer.load(folder, end="<eos>").boundaries == Boundaries(1, 2)
