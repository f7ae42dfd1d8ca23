from __future__ import annotations

import subprocess
import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from stretto.errors import StrettoError
from stretto.run.data import readers
from stretto.run.data.tokenizer import END_OF_TEXT, Tokenizer

TEXT = Path(readers.__file__).read_text()
TRAINED = Tokenizer.train([TEXT], 400)


@given(st.text())
def test_any_text_comes_back(text: str):
    assert TRAINED.decode(TRAINED.encode(text)) == text


def test_training_gives_the_requested_vocabulary_and_shorter_text():
    assert TRAINED.vocab_size == 400
    assert len(TRAINED.encode(TEXT)) < 0.7 * len(TEXT)
    together = [ids.tolist() for ids in TRAINED.encode_batch([TEXT, "a b"])]
    assert together == [TRAINED.encode(TEXT), TRAINED.encode("a b")]


def test_little_text_gives_a_smaller_vocabulary():
    assert Tokenizer.train(["aaaa aaaa"], 4096).vocab_size < 300


def test_training_is_the_same_in_every_process():
    code = (
        "from stretto.run.data import readers; from pathlib import Path;"
        "from stretto.run.data.tokenizer import Tokenizer;"
        "print(Tokenizer.train([Path(readers.__file__).read_text()], 400).fingerprint)"
    )
    for hash_seed in ("1", "2"):
        process = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert process.stdout.strip() == TRAINED.fingerprint


def test_saved_and_loaded_is_the_same(tmp_path: Path):
    TRAINED.save(tmp_path / "tokenizer.json")
    for path in (tmp_path / "tokenizer.json", tmp_path):
        loaded = Tokenizer.load(path)
        assert loaded.fingerprint == TRAINED.fingerprint
        assert loaded.encode(TEXT) == TRAINED.encode(TEXT)


def test_text_that_spells_the_end_of_text_is_text():
    text = f"before{END_OF_TEXT}after"
    ids = TRAINED.encode_batch([text])[0]
    assert TRAINED.endoftext not in ids
    assert TRAINED.decode(ids) == text
    assert TRAINED.decode([*TRAINED.encode("a"), TRAINED.endoftext]) == "a"


def test_a_long_document_in_pieces_has_the_tokens_of_the_whole(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(readers, "PIECE", 700)
    for text in (TEXT, TEXT.replace("\n", "\r\n"), TEXT.replace("\n", " ")):
        uncut = [readers.TextPiece("n", text, ends=True)]
        pieces = [piece.text for piece in readers.cut_pieces(uncut, lambda: TRAINED.cuts)]
        assert len(pieces) > 5
        assert list(chain.from_iterable(TRAINED.encode_batch(pieces))) == TRAINED.encode(text)


def test_a_tokenizer_of_another_family(tmp_path: Path):
    inner = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "a": 7}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.enable_truncation(1)
    inner.enable_padding()
    inner.save(str(tmp_path / "none.json"))
    inner.add_special_tokens(["</s>"])  # of which nothing says that it ends a text
    inner.save(str(tmp_path / "none.json"))
    with pytest.raises(StrettoError, match=r"none\.json: has no end-of-text"):
        _ = Tokenizer.load(tmp_path / "none.json").endoftext
    inner.save(str(tmp_path / "with.json"))
    tokenizer = Tokenizer.load(tmp_path / "with.json", end="</s>")
    assert tokenizer.endoftext == inner.token_to_id("</s>")
    assert tokenizer.vocab_size == 8
    assert [ids.tolist() for ids in tokenizer.encode_batch(["a b a", "b"])] == [[7, 0, 7], [0]]


@pytest.mark.parametrize("vocab", [0, -1, 256, 1 << 32])
def test_impossible_vocabularies(vocab: int):
    with pytest.raises(StrettoError, match=f"vocab {vocab}"):
        Tokenizer.train(["a"], vocab)


def test_files_that_are_no_tokenizer(tmp_path: Path):
    with pytest.raises(StrettoError, match="no such file"):
        Tokenizer.load(tmp_path / "tokenizer.json")
    for content in (b"", b"{}", b"\xff\xfe", b'{"model": 1}', TRAINED.to_bytes()[:-40]):
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(StrettoError, match="not a tokenizer file"):
            Tokenizer.load(tmp_path)


@given(st.text())
def test_bytes_of_text_are_counted_by_token(text: str) -> None:
    ids = np.array([*TRAINED.encode(text), TRAINED.endoftext])
    assert TRAINED.text_bytes(ids) == len(text.encode())


def test_bytes_of_tokens_that_are_no_bytes() -> None:
    """Words and spaces, as of SentencePiece."""
    inner = tokenizers.Tokenizer(models.WordLevel({"<eos>": 0, "▁né": 1, "▁bc": 2}, unk_token="<eos>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    inner.add_special_tokens(["<eos>"])
    tokenizer = Tokenizer(inner)
    assert tokenizer.token_bytes is None
    assert tokenizer.text_bytes(np.array([1, 2, 0])) == len("né bc".encode())
