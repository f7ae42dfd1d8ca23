"""Text is rewritten as SentencePiece does it."""

from __future__ import annotations

import io
import random
from functools import cache
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import normalizers

from stretto.run.data.sentencepiece_model import SentencePieceModel, rewriting, unequal

NAMES = ("nmt_nfkc", "nfkc")
NEWER = 0x10000  # composition in newer scripts depends on the library's tables of Unicode
MARKS = [*map(chr, range(0x300, 0x346)), *"\u200d\u0e33\ufe0f\U0001f3fb\u1161\u11a8\uff9e\uff9f\u3099\u309a"]
BASES = [
    *"aeiouAEIOUnz<=02 ▁\t\n\r\x00\x01\x7f\u00a0\ufff0\ufff1가ㄱㅏᄀｶﾊカは한ﬁｅ㍿\u0600",
    "\r\n",
    "🇩🇪",
    "\ufff00",
    "\ufff01",
]


@cache
def both(
    name: str,
) -> tuple[sentencepiece.SentencePieceProcessor, normalizers.Normalizer, SentencePieceModel]:
    """SentencePiece's normalizer, the one built here, and the model."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["some text to train on"] * 9),
        model_writer=model,
        vocab_size=30,
        hard_vocab_limit=False,
        minloglevel=2,
        model_type="bpe",
        normalization_rule_name=name,
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
    )
    parsed = SentencePieceModel.parse(Path("x.model"), model.getvalue())
    rewritten = normalizers.Sequence(rewriting(parsed.normalizer.precompiled_charsmap, parsed.rules))
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()), rewritten, parsed


def equal(name: str, text: str) -> None:
    processor, normalizer, _ = both(name)
    assert normalizer.normalize_str(text).replace(" ", "▁") == processor.normalize(text).replace(" ", "▁")


@pytest.mark.parametrize("name", ["nmt_nfkc", pytest.param("nfkc", marks=pytest.mark.slow)])
def test_rules(name: str) -> None:
    processor, _, model = both(name)
    rules = model.rules
    assert unequal(rules) is None
    assert len(rules) > 200_000
    assert rules["ﬁ"] == "fi"
    assert (rules.get("\x07"), rules.get("e\u0302\u0301")) == ("" if name == "nmt_nfkc" else None, "ế")
    draw = random.Random(0)
    several = [text for text in rules if len(text) > 1 and max(map(ord, text)) < NEWER]
    for text in draw.sample(several, 1000):
        assert processor.normalize(text) == rules[text].replace(" ", "▁")
        equal(name, text)
    for text in rules:
        if len(text) == 1:
            equal(name, "e" + text + "\u0301")
    for _ in range(1500):
        parts = [draw.choice(draw.choice((MARKS, MARKS, BASES, several))) for _ in range(draw.randint(1, 9))]
        equal(name, "".join(parts))


@pytest.mark.parametrize("name", NAMES)
@given(st.text(st.characters(max_codepoint=NEWER - 1, exclude_categories=("Cs",)) | st.sampled_from(MARKS)))
@example("\u0301")
@example("\r\n\u0301")
def test_any_text(name: str, text: str) -> None:
    equal(name, text)


def test_what_is_kept() -> None:
    model = both("nfkc")[2]
    steps = rewriting(model.normalizer.precompiled_charsmap, model.rules, ["<e>", "<e>e"])
    normalizer = normalizers.Sequence(steps)
    assert normalizer.normalize_str("<e>\u0338") == "<e>\u0338"  # a stroke through > is a character otherwise
    assert normalizer.normalize_str("<e>e\u0301x\u0301>\u0338") == "<e>e\u0301x\u0301≯"
