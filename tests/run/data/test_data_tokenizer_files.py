"""Tokenizers in the files of other programs give the ids of their own libraries."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import random
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
import tokenizers
from tokenizers import Regex, models, pre_tokenizers, trainers
from transformers import GPT2Tokenizer

from stretto.errors import StrettoError
from stretto.run.config.sources import tokenizer_at
from stretto.run.data import rank_files, sentencepiece_model
from stretto.run.data.build import build
from stretto.run.data.sentencepiece_model import is_sentencepiece
from stretto.run.data.tokenizer import Tokenizer

LINES = [line for line in Path(__file__).read_text().splitlines() if line.strip()]
FOREIGN = """\
Größe und Maß, naïve café
数字 123 和汉字
Привет, мир
🙂👩‍👩‍👧 🇩🇪
<s> </s> <unk> <0x41> CDEF 9876543210
""".splitlines()
PIECES = [
    *("a", "é", "e\u0301", "ﬁ", "汉", "🙂", "👩‍👩‍👧", "4567", "...", "</s>", "<s>", "<unk>", "<0x41>"),
    *("<|endoftext|>", "▁", "'s", "DON'T", "\ufeff", "\x00"),
]
PIECES += ["<sep>", "XYZ", "<ctl>", "＜sep＞", "e\u0323\u0301", "\u0338", "ｅ", "カ\u3099", "\u200b", "\x07"]
BITS = [*PIECES, "the ", " .", " ", "   ", "\t", "\n", "\n\n", "\r\n", "\u00a0", "\u3000"]


@pytest.fixture(autouse=True, scope="module")
def rules_checked_once() -> Iterator[None]:
    """Models that are trained here have few tables of rules, which take long to check."""
    unequal, checked = sentencepiece_model.unequal, dict[int, str | None]()

    def unequal_once(rules: Mapping[str, str]) -> str | None:
        if (key := len(rules)) not in checked:  # no two of the tables have the same number of rules
            checked[key] = unequal(rules)
        return checked[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sentencepiece_model, "unequal", unequal_once)
        yield


SYMBOLS: dict[str, Any] = {"user_defined_symbols": ["<sep>", "XYZ", "<s"], "control_symbols": ["<ctl>"]}


def texts(number: int = 1500) -> Iterator[str]:
    """Varied texts: whole lines, and lines and awkward bits in any order."""
    yield from (*LINES, *FOREIGN, "", "\n".join(LINES))
    draw = random.Random(0)
    for _ in range(number):
        yield "".join(
            draw.choice(BITS) if draw.random() < 0.7 else draw.choice(LINES)[: draw.randint(1, 30)]
            for _ in range(draw.randint(1, 14))
        )


def train_bpe(folder: Path) -> tuple[Path, Path]:
    """GPT-2's two files, as its library writes them."""
    inner = tokenizers.ByteLevelBPETokenizer()
    inner.train_from_iterator([*LINES, *FOREIGN], 600, special_tokens=["<|endoftext|>"], show_progress=False)
    inner.save_model(str(folder))
    return folder / "vocab.json", folder / "merges.txt"


def test_vocab_and_merges(tmp_path: Path) -> None:
    vocab, merges = train_bpe(tmp_path)
    reference = GPT2Tokenizer(str(vocab), str(merges))
    tokenizer = Tokenizer.load(tmp_path)
    for text in texts():
        ids = tokenizer.encode(text)
        if "<|endoftext|>" not in text:  # which theirs takes for the token itself
            assert ids == reference.encode(text)
        assert tokenizer.decode(ids) == text
    assert tokenizer.endoftext == json.loads(vocab.read_text())["<|endoftext|>"]
    names = [tmp_path / "gpt2-vocab.json", tmp_path / "gpt2-merges.txt"]
    vocab.rename(names[0])
    merges.rename(names[1])
    for path in (tmp_path, names[0], names, names[::-1], [str(name) for name in names]):
        assert Tokenizer.load(path).fingerprint == tokenizer.fingerprint


def test_a_vocabulary_needs_its_merges(tmp_path: Path) -> None:
    vocab, merges = train_bpe(tmp_path)
    merges.unlink()
    with pytest.raises(
        StrettoError, match=r"vocab\.json: the vocabulary of a BPE without its merges"
    ) as caught:
        Tokenizer.load(vocab)
    assert "merges.txt beside it" in str(caught.value.hint)


def test_other_families_with_vocab_and_merges_are_refused(tmp_path: Path) -> None:
    vocab, _ = train_bpe(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    with pytest.raises(StrettoError, match="of Qwen2Tokenizer") as caught:
        Tokenizer.load(vocab)
    assert "save_pretrained" in str(caught.value.hint)


def train_ranks(pattern: str) -> dict[bytes, int]:
    inner = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator([*LINES, *FOREIGN], trainer)
    byte_of = {character: byte for byte, character in enumerate(rank_files._alphabet())}
    return {bytes(byte_of[c] for c in token): rank for token, rank in inner.get_vocab().items()}


def write_ranks(path: Path, ranks: dict[bytes, int]) -> Path:
    lines = (
        base64.b64encode(token) + b" %d\n" % ranks[token] for token in sorted(ranks, key=ranks.__getitem__)
    )
    path.write_bytes(b"".join(lines))
    return path


@pytest.mark.parametrize("pattern", ["_GPT2", "_CL100K", "_O200K"])
def test_ranks_of_tiktoken(tmp_path: Path, pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expression = getattr(rank_files, pattern)
    ranks = train_ranks(expression)
    end = len(ranks)
    reference = tiktoken.Encoding(
        "small", pat_str=expression, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": end}
    )
    path = write_ranks(tmp_path / "small.tiktoken", ranks)
    (tmp_path / "pattern.txt").write_text(expression + "\n")
    pair = [str(path), str(tmp_path / "pattern.txt")]
    with pytest.raises(StrettoError, match="has no end-of-text token") as caught:  # none is made up
        _ = Tokenizer.load(pair).endoftext
    assert "data.end_of_text=TOKEN" in str(caught.value.hint)
    tokenizer = Tokenizer.load(pair, end=str(end))
    assert (tokenizer.endoftext, tokenizer.vocab_size) == (end, end + 1)
    for text in texts():
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text, disallowed_special=())
        assert tokenizer.decode(ids) == text
    with pytest.raises(StrettoError, match=f"{end} ranks of no published encoding"):
        Tokenizer.load(path)
    # one that is known by its content
    special = {end + 1: "<|endoftext|>", end + 3: "<|eot_id|>"}
    encoding = rank_files._Encoding(name="small", pattern=expression, special=special)
    monkeypatch.setitem(rank_files._ENCODINGS, hashlib.sha256(path.read_bytes()).hexdigest(), encoding)
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\r\n".join(lines[::-1]))  # the same, written otherwise
    tokenizer = Tokenizer.load(path)
    assert (tokenizer.endoftext, tokenizer.vocab_size, tokenizer.special("<|eot_id|>")) == (
        end + 1,
        end + 4,
        end + 3,
    )
    assert tokenizer.encode("the ") == reference.encode("the ")


def test_a_gap_within_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As p50k_base has one, for the end of text."""
    ranks = {token: rank + (rank >= 300) for token, rank in train_ranks(rank_files._GPT2).items()}
    encoding = rank_files._Encoding(name="gap", pattern=rank_files._GPT2, special={300: "<|endoftext|>"})
    path = write_ranks(tmp_path / "gap.tiktoken", ranks)
    monkeypatch.setitem(rank_files._ENCODINGS, hashlib.sha256(path.read_bytes()).hexdigest(), encoding)
    tokenizer = Tokenizer.load(path)
    assert (tokenizer.endoftext, tokenizer.vocab_size) == (300, len(ranks) + 1)
    reference = tiktoken.Encoding(
        "gap", pat_str=rank_files._GPT2, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 300}
    )
    for text in texts(200):
        assert tokenizer.encode(text) == reference.encode(text, disallowed_special=())


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"YQ== 0\nno line of ranks\n", "line 2 is not a token in base64"),
        (b"YQ== 0\n", "not all 256 bytes have a rank"),
        (b"a text", "line 1 is not a token"),
        (b"\x00\x01\x02", "line 1 is not a token"),
        (b"", "not all 256 bytes"),
    ],
)
def test_files_that_are_none_of_them(tmp_path: Path, content: bytes, error: str) -> None:
    (tmp_path / "x.tiktoken").write_bytes(content)
    with pytest.raises(StrettoError, match=f"not a tokenizer file .*{error}"):
        Tokenizer.load(tmp_path / "x.tiktoken")


def train_pieces(kind: str, **more: object) -> bytes:
    model = io.BytesIO()
    settings = {
        "sentence_iterator": iter([*LINES, *FOREIGN * 5]),
        "character_coverage": 1.0,
        "normalization_rule_name": "identity",
        **more,
    }
    sentencepiece.SentencePieceTrainer.train(
        model_writer=model,
        vocab_size=500,
        hard_vocab_limit=kind != "unigram",
        minloglevel=2,
        model_type=kind,
        **settings,
    )
    return model.getvalue()


@pytest.mark.parametrize(
    "more",
    [
        {"byte_fallback": True, "remove_extra_whitespaces": False},  # as Llama's
        {"byte_fallback": True, "remove_extra_whitespaces": False, "add_dummy_prefix": False},
        {"byte_fallback": True, "allow_whitespace_only_pieces": True, "split_digits": True},
        {"add_dummy_prefix": False, "character_coverage": 0.99},
        {"split_by_whitespace": False, "remove_extra_whitespaces": False},
        {"normalization_rule_name": "nmt_nfkc"},  # what spm_train does unless it is told otherwise
        pytest.param(
            {"normalization_rule_name": "nfkc", "byte_fallback": True, "add_dummy_prefix": False},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": False, **SYMBOLS},
            marks=pytest.mark.slow,
        ),
        {"byte_fallback": True, "remove_extra_whitespaces": False, "add_dummy_prefix": False, **SYMBOLS},
    ],
)
def test_pieces_of_bpe(tmp_path: Path, more: dict[str, Any]) -> None:
    data = train_pieces("bpe", **more)
    assert is_sentencepiece(data)
    (tmp_path / "tokenizer.model").write_bytes(data)
    reference, tokenizer = sentencepiece.SentencePieceProcessor(model_proto=data), Tokenizer.load(tmp_path)
    assert (tokenizer.endoftext, tokenizer.vocab_size) == (reference.eos_id(), reference.vocab_size())
    for text in texts():
        ids = tokenizer.encode(text)
        symbols = more.get("user_defined_symbols", ()) if more.get("add_dummy_prefix", True) else ()
        alone = reference.normalize(text) in [f"▁{symbol}" for symbol in symbols]
        assert ids == reference.encode(text)[alone:]  # of a symbol alone ours lacks the prefix
        if "byte_fallback" in more and not more.get("remove_extra_whitespaces", True):
            assert tokenizer.decode(ids) == reference.decode(ids)


@pytest.mark.parametrize(
    "more",
    [
        {"byte_fallback": True, "remove_extra_whitespaces": False},
        {"normalization_rule_name": "nmt_nfkc", **SYMBOLS},
        {"sentence_iterator": iter(["no signs at all"] * 9)},  # whose special pieces have some
        pytest.param(
            {"normalization_rule_name": "nfkc", "byte_fallback": True, "add_dummy_prefix": False},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_pieces_of_unigrams(tmp_path: Path, more: dict[str, object]) -> None:
    """Equal, but for cuts into the same pieces in another order, whose scores are the same."""
    data = train_pieces("unigram", **more)
    (tmp_path / "tokenizer.model").write_bytes(data)
    reference, tokenizer = sentencepiece.SentencePieceProcessor(model_proto=data), Tokenizer.load(tmp_path)
    several, same, ties = [*texts()], 0, 0
    for text in several:
        ids, two = tokenizer.encode(text), reference.encode(text)
        same += ids == two
        ties += ids != two and sorted(ids) == sorted(two)
    assert same + ties == len(several)
    assert ties < 0.01 * len(several)


@pytest.mark.parametrize(
    ("kind", "more", "error"),
    [
        ("bpe", {"normalization_rule_name": "nmt_nfkc_cf"}, "rewrites text by rules of its own, such as"),
        (
            "bpe",
            {"normalization_rule_name": "nmt_nfkc", "user_defined_symbols": ["\n\n"]},
            r"user-defined symbol '\\n\\n', which its own rules would rewrite",
        ),
        ("bpe", {"treat_whitespace_as_suffix": True}, "treat_whitespace_as_suffix"),
        ("char", {}, "of kind CHAR"),
    ],
)
def test_models_whose_ids_would_differ_are_refused(
    tmp_path: Path, kind: str, more: dict[str, object], error: str
) -> None:
    (tmp_path / "t.model").write_bytes(train_pieces(kind, **more))
    with pytest.raises(StrettoError, match=error) as caught:
        Tokenizer.load(tmp_path)
    assert "preprocess_data.py" in str(caught.value.hint)


def test_a_vocabulary_of_bert_is_named(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "##s"]))
    with pytest.raises(StrettoError, match="the vocabulary of a WordPiece") as caught:
        Tokenizer.load(tmp_path / "vocab.txt")
    assert "BertTokenizerFast" in str(caught.value.hint)


def test_ranks_of_megatron_are_named(tmp_path: Path) -> None:
    (tmp_path / "ranks.json").write_text('[{"rank": 0, "token_bytes": "AA==", "token_str": "0"}]')
    with pytest.raises(StrettoError, match="as Megatron's TikTokenizer has"):
        Tokenizer.load(tmp_path / "ranks.json")


def test_damaged_models(tmp_path: Path) -> None:
    data = train_pieces("bpe")
    table = train_pieces("bpe", normalization_rule_name="nfkc")
    at = table.index(b"nfkc") + 100  # within the table of rules
    for damaged in (data[: len(data) // 2], table[:at] + b"\xff" * 99 + table[at + 99 :]):
        (tmp_path / "t.model").write_bytes(damaged)
        with pytest.raises(StrettoError, match="damaged SentencePiece model"):
            Tokenizer.load(tmp_path / "t.model")


def test_models_take_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.model").write_bytes(train_pieces("bpe"))
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(StrettoError, match="takes the package sentencepiece") as caught:
        Tokenizer.load(tmp_path / "t.model")
    assert caught.value.hint == "pip install 'stretto[sentencepiece]'"


def test_the_tokens_keep_the_tokenizer_as_a_json_file(tmp_path: Path) -> None:
    """So that generation, export and another build find it; a long document has the tokens of the whole."""
    data = train_pieces("bpe", byte_fallback=True, remove_extra_whitespaces=False)
    (tmp_path / "t.model").write_bytes(data)
    text = "a longer text. \n\n" * 30_000  # more than a piece
    (tmp_path / "text.txt").write_text(text)
    folder = build(tmp_path / "text.txt", tmp_path / "out", tokenizer=tmp_path / "t.model")
    reference = sentencepiece.SentencePieceProcessor(model_proto=data)
    assert folder.tokens[:].tolist() == [*reference.encode(text), reference.eos_id()]
    stored = Tokenizer.load(tmp_path / "out" / "tokenizer.json")
    assert stored.fingerprint == Tokenizer.load(tmp_path / "t.model").fingerprint == folder.fingerprint


@pytest.mark.parametrize(
    ("ids", "error"),
    [
        ({"a": 0, "b": 1_000_000_000}, "has the id 1000000000"),
        ({"a": 0, "b": -1}, "has the id -1"),
        ({"a": 0, "b": "1"}, "has the id '1'"),
    ],
)
def test_impossible_ids_are_refused_before_there_is_room_for_them(
    tmp_path: Path, ids: dict[str, object], error: str
) -> None:
    body = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": ids, "unk_token": "a"},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(body))
    with pytest.raises(StrettoError, match=error):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("kind", ["WordLevel", "WordPiece", "BPE"])
def test_an_unknown_token_that_is_not_in_the_vocabulary(tmp_path: Path, kind: str) -> None:
    model: dict[str, object] = {"type": kind, "vocab": {"a": 0, "b": 1}, "unk_token": "<unk>"}
    model |= {"WordPiece": {"continuing_subword_prefix": "##", "max_input_chars_per_word": 9}}.get(kind, {})
    body = {"version": "1.0", "added_tokens": [], "model": {**model, "merges": []}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(body))
    with pytest.raises(StrettoError, match="its unk_token '<unk>' is not in its vocabulary"):
        Tokenizer.load(tmp_path)


def test_a_tokenizer_that_would_leave_text_out(tmp_path: Path) -> None:
    """A BPE of characters without a token for the others."""
    inner = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "<|endoftext|>": 2}, []))
    assert inner.encode("abz").ids == [0, 1]
    inner.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(StrettoError, match="leaves out of a text what it does not know"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("use", ["encode", "encode_batch", "encode_templated", "build"])
def test_what_the_library_raises_of_a_text_is_one_error(tmp_path: Path, use: str) -> None:
    """Such as a word that it does not know, and has no token for."""
    body = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": 1,
                "content": "<|endoftext|>",
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
        ],
        "model": {"type": "Unigram", "unk_id": None, "vocab": [["a", -1.0], ["<|endoftext|>", -2.0]]},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(body))
    (tmp_path / "text.txt").write_text("a z")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert loaded.encode("a") == [0]
    if use == "build":
        act = partial(build, tmp_path / "text.txt", tmp_path / "out", tokenizer=tmp_path / "tokenizer.json")
    else:
        act = partial(getattr(loaded, use), "a z" if use == "encode" else ["a z"])
    with pytest.raises(StrettoError, match=r"tokenizer\.json: fails on the text: "):
        act()


def test_what_makes_the_library_panic_is_one_error(tmp_path: Path) -> None:
    charsmap = base64.b64encode(b"\xff\xff\xff\x7f" * 4).decode()
    body = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap},
        "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(body))
    with pytest.raises(StrettoError, match="not a tokenizer file"):
        Tokenizer.load(tmp_path)


def test_what_a_path_names(tmp_path: Path) -> None:
    assert tokenizer_at(tmp_path) == []
    (tmp_path / "a.model").write_bytes(b"")
    assert tokenizer_at(tmp_path) == [tmp_path / "a.model"]
    (tmp_path / "b.model").write_bytes(b"")
    assert tokenizer_at(tmp_path) == []  # which of them?
    (tmp_path / "tokenizer.json").write_bytes(b"")
    assert tokenizer_at(tmp_path) == [tmp_path / "tokenizer.json"]
    assert tokenizer_at(tmp_path / "nowhere") == []
