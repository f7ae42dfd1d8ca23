"""Published files of ranks, and of SentencePiece, give the ids of their own programs."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import re
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import sentencepiece
import tiktoken
import tokenizers
from tiktoken.load import load_tiktoken_bpe

from published_files import published
from stretto.errors import StrettoError
from stretto.run.data import rank_files
from stretto.run.data.boundaries import Boundaries
from stretto.run.data.tokenizer import Tokenizer

EVERY_BYTE = " ".join(base64.b64encode(bytes([byte])).decode() for byte in range(256))
LINES = Path(__file__).read_text().splitlines(keepends=True)
BITS = [
    *(
        "Größe, naïve",
        "数字 123 和汉字",
        "Привет",
        "🙂👩‍👩‍👧 🇩🇪",
        "ｶﾞ",
        "Ⅷ",
        "\u200b",
        "e\u0323\u0301",
        "DON'T I'll",
    ),
    *(
        "/",
        "//",
        "</s>",
        "<s>",
        "<unk>",
        "[INST]",
        "<EOT>",
        "<|begin_of_text|>",
        "<|endoftext|>",
        "s>",
        "▁",
        "\x00",
    ),
    *(" ", "   ", "\t", "\n", "\r\n\r\n", "\u00a0", "1234567", "...)/\n", "aB", "ABc", "a\u0301", "the "),
]


def texts(number: int = 300) -> Iterator[str]:
    """Lines, and awkward bits in any order."""
    yield from ("", "".join(LINES), *LINES[:40])
    draw = random.Random(0)
    for _ in range(number):
        parts = draw.choices(
            [*BITS, *(line[: draw.randint(1, 20)] for line in draw.choices(LINES, k=6))], k=9
        )
        yield "".join(parts[: draw.randint(1, 9)])


def differing(tokenizer: Tokenizer, expected: Iterable[tuple[str, list[int]]]) -> list[str]:
    return [text for text, ids in expected if tokenizer.encode(text) != ids]


@pytest.mark.parametrize(
    ("name", "pattern", "first", "names", "boundaries"),
    [
        ("openai-whisper/gpt2.tiktoken", "_GPT2", 50_256, ["<|endoftext|>"], Boundaries(50_256)),
        pytest.param(
            "openai-whisper/multilingual.tiktoken",
            "_GPT2",
            50_257,
            ["<|endoftext|>", "<|startoftranscript|>"],
            Boundaries(50_257),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "llama-models/llama4.model",
            "_O200K",
            200_000,
            ["<|begin_of_text|>", "<|end_of_text|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"],
            Boundaries(200_001, 200_000),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_rank_files(name: str, pattern: str, first: int, names: list[str], boundaries: Boundaries) -> None:
    """Those of Whisper have an empty token."""
    path, expression = published(name), getattr(rank_files, pattern)
    ranks = load_tiktoken_bpe(str(path))
    reference = tiktoken.Encoding("theirs", pat_str=expression, mergeable_ranks=ranks, special_tokens={})
    tokenizer = Tokenizer.load(path)
    assert not differing(
        tokenizer, ((text, reference.encode(text, disallowed_special=())) for text in texts())
    )
    assert tokenizer.boundaries == boundaries
    assert [tokenizer.text_of(first + i) for i in range(len(names))] == names
    assert max(ranks.values()) < first


def test_llama_4_has_its_special_tokens() -> None:
    special = rank_files._llama_4()
    assert [*special] == [*range(200_000, 202_048)]
    assert len({*special.values()}) == len(special)
    for id_, text in {
        200_005: "<|header_start|>",
        200_008: "<|eot|>",
        200_018: "<|finetune_right_pad|>",
        200_080: "<|image_start|>",
        200_092: "<|patch|>",
        201_142: "<|reasoning_thinking_start|>",
        201_144: "<|reserved_special_token_0|>",
    }.items():
        assert special[id_] == text


def test_llama_3_in_both_of_its_files(tmp_path: Path) -> None:
    """The ranks that Meta publishes, with an expression too, and the tokenizer.json. Its begin of text is the
    first id that is no rank.
    """
    (tmp_path / "pattern.txt").write_text(rank_files._CL100K)
    ranks = Tokenizer.load([str(published("llama-models/llama3.model")), str(tmp_path / "pattern.txt")])
    reference = tokenizers.Tokenizer.from_file(str(published("lenml-llama3_1/tokenizer.json")))
    reference.encode_special_tokens = True
    every = list(texts())
    ids = [encoding.ids for encoding in reference.encode_batch(every, add_special_tokens=False)]
    assert not differing(ranks, zip(every, ids, strict=True))
    assert ranks.boundaries == Boundaries(128_001, 128_000)


@pytest.mark.slow
def test_the_ranks_of_gpt_oss_are_known_by_their_content(tmp_path: Path) -> None:
    """Those in its tokenizer.json, as a rank file of o200k_base, have the checksum that tiktoken expects."""
    body = json.loads(published("lenml-gptoss/tokenizer.json").read_bytes())
    byte_of = {letter: byte for byte, letter in enumerate(rank_files._alphabet())}
    lines = (
        base64.b64encode(bytes(byte_of[letter] for letter in token)) + b" %d\n" % rank
        for token, rank in sorted(body["model"]["vocab"].items(), key=lambda item: item[1])
        if rank < 199_998
    )
    path = tmp_path / "o200k.tiktoken"
    path.write_bytes(b"".join(lines))
    assert hashlib.sha256(path.read_bytes()).hexdigest() in rank_files._ENCODINGS
    tokenizer = Tokenizer.load(path)
    reference = tokenizers.Tokenizer.from_file(str(published("lenml-gptoss/tokenizer.json")))
    reference.encode_special_tokens = True
    assert not differing(tokenizer, ((text, reference.encode(text).ids) for text in texts(300)))
    assert tokenizer.boundaries == Boundaries(199_999)


def test_tekken(tmp_path: Path) -> None:
    """Mistral's: special tokens first, then as many ranks as the vocabulary has room for."""
    path = published("mistral-common/tekken_240911.json")
    body = json.loads(path.read_bytes())
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in body["vocab"][:130_072]}
    pattern = body["config"]["pattern"]
    reference = tiktoken.Encoding("tekken", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    expected = [[1000 + id_ for id_ in reference.encode(text, disallowed_special=())] for text in texts()]
    tokenizer = Tokenizer.load(path)
    assert not differing(tokenizer, zip(texts(), expected, strict=True))
    assert (tokenizer.vocab_size, tokenizer.boundaries) == (131_072, Boundaries(2, 1))
    assert [tokenizer.text_of(id_) for id_ in (0, 1, 2, 3, 19, 20, 999)] == [
        *("<unk>", "<s>", "</s>", "[INST]", "[TOOL_CONTENT]", "<SPECIAL_20>", "<SPECIAL_999>"),
    ]
    # its own list of special tokens comes before the usual
    listed = [{"rank": 5, "token_str": "</s>", "is_control": True}]
    body |= {"vocab": body["vocab"][:300], "special_tokens": listed}
    body["config"]["default_vocab_size"] = 1300
    (tmp_path / "tekken.json").write_text(json.dumps(body))
    assert Tokenizer.load(tmp_path).boundaries == Boundaries(5)
    body["config"]["default_vocab_size"] = 200_000
    (tmp_path / "tekken.json").write_text(json.dumps(body))
    with pytest.raises(StrettoError, match="do not fill a vocabulary of 200000"):
        Tokenizer.load(tmp_path)


def test_claudes_json() -> None:
    """It normalises text before, as its package does; nothing says which token ends a text."""
    path = published("anthropic-tokenizer/claude.json")
    reference = tokenizers.Tokenizer.from_file(str(published("lenml-claude/tokenizer.json")))
    reference.encode_special_tokens = True
    tokenizer = Tokenizer.load(path, end="<EOT>")
    assert not differing(tokenizer, ((text, reference.encode(text).ids) for text in texts()))
    assert (tokenizer.boundaries, tokenizer.special("<META>")) == (Boundaries(0), 1)
    body = json.loads(path.read_bytes())
    first = re.match(r"! (\d+) ", body["bpe_ranks"])
    assert first is not None
    tokens = body["bpe_ranks"].split()[2:]
    ranks = {base64.b64decode(token): int(first[1]) + i for i, token in enumerate(tokens)}
    plain = tiktoken.Encoding("claude", pat_str=body["pat_str"], mergeable_ranks=ranks, special_tokens={})
    for text in texts(200):
        normalised = unicodedata.normalize("NFKC", text)
        assert tokenizer.encode(text) == plain.encode(normalised, disallowed_special=())
    with pytest.raises(StrettoError, match="has no end-of-text token") as caught:
        _ = Tokenizer.load(path).endoftext
    assert "data.end_of_text" in str(caught.value.hint)


@pytest.mark.parametrize(
    "name",
    [
        "botchan_en_bpe_1000",
        pytest.param("botchan_en_unigram_1000", marks=pytest.mark.slow),
        "kyoto_ja_unigram_8000",
    ],
)
def test_models_that_ship_with_sentencepiece(name: str) -> None:
    """The unigrams of one have no slash, which the special piece `</s>` is spelt with."""
    path = published(f"sentencepiece/{name}.model")
    reference, tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(path)), Tokenizer.load(path)
    assert not differing(tokenizer, ((text, reference.encode(text)) for text in texts()))
    assert tokenizer.boundaries == Boundaries(reference.eos_id())


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"bpe_ranks": "! x YQ==", "special_tokens": {}, "pat_str": "."}, "line 1 of bpe_ranks"),
        ({"bpe_ranks": "! 0 YQ==", "special_tokens": {}, "pat_str": "."}, "not all 256 bytes have a rank"),
        ({"bpe_ranks": "! 0 YQ==", "pat_str": "."}, "special_tokens"),
        (
            {"bpe_ranks": f"! 1 {EVERY_BYTE}", "special_tokens": {"a": 0}, "pat_str": "."},
            "'a' is a special token",
        ),
        (
            {"config": {"default_num_special_tokens": 9, "default_vocab_size": 3}, "vocab": []},
            "9 special tokens of 3",
        ),
        ({"config": {"default_num_special_tokens": 0}, "vocab": []}, "default_vocab_size"),
    ],
)
def test_damaged_files_are_one_error(tmp_path: Path, body: dict[str, object], error: str) -> None:
    (tmp_path / "x.json").write_text(json.dumps(body))
    with pytest.raises(StrettoError, match=f"not a tokenizer file .*{error}"):
        Tokenizer.load(tmp_path / "x.json")


def test_impossible_ids_of_special_tokens_are_refused_before_there_is_room_for_them(tmp_path: Path) -> None:
    body = {"bpe_ranks": f"! 1 {EVERY_BYTE}", "special_tokens": {"<a>": 10**9}, "pat_str": "."}
    (tmp_path / "x.json").write_text(json.dumps(body))
    with pytest.raises(StrettoError, match="has the id 1000000000"):
        Tokenizer.load(tmp_path / "x.json")
