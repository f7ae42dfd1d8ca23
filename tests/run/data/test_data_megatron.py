"""Megatron's indexed datasets, read and written; the samples are built here byte by byte."""

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stretto.cli.main import run
from stretto.errors import StrettoError
from stretto.run.config.data import DataConfig
from stretto.run.config.sources import megatron_prefix
from stretto.run.data import megatron
from stretto.run.data.build import build, build_megatron
from stretto.run.data.dataset import DocumentSamples, WindowSamples
from stretto.run.data.megatron import DatasetVocabulary, MegatronDataset
from stretto.run.data.open import open_source
from stretto.run.data.split import split_tokens
from stretto.run.data.tokenizer import Tokenizer

CODES = {1: "<B", 2: "<b", 3: "<h", 4: "<i", 5: "<q", 8: "<H"}
DOCUMENTS = [[[5, 6, 7], [8, 0]], [[1, 0]], [], [[9, 9, 9, 9, 0]]]  # of sequences; the third has none


def write(
    prefix: Path, documents: list[list[list[int]]], code: int = 8, modes: list[int] | None = None
) -> Path:
    """A dataset from the format's description, independent of the code under test."""
    sequences = [sequence for document in documents for sequence in document]
    item = struct.calcsize(CODES[code])
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    index += struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(documents) + 1)
    index += b"".join(struct.pack("<i", len(sequence)) for sequence in sequences)
    at = 0
    for sequence in sequences:
        index += struct.pack("<q", at)
        at += item * len(sequence)
    first = 0
    index += struct.pack("<q", 0)
    for document in documents:
        first += len(document)
        index += struct.pack("<q", first)
    index += b"".join(struct.pack("<b", mode) for mode in modes or [])
    Path(f"{prefix}.bin").write_bytes(b"".join(struct.pack(CODES[code], i) for s in sequences for i in s))
    Path(f"{prefix}.idx").write_bytes(index)
    return prefix


def opened(prefix: Path, vocab: int = 10) -> MegatronDataset:
    return MegatronDataset(prefix, DatasetVocabulary(size=vocab))


@pytest.mark.parametrize("code", CODES)
def test_every_type_of_ids(tmp_path: Path, code: int) -> None:
    dataset = opened(write(tmp_path / "text_document", DOCUMENTS, code))
    assert dataset.tokens[:].tolist() == [5, 6, 7, 8, 0, 1, 0, 9, 9, 9, 9, 0]
    assert dataset.offsets[:].tolist() == [0, 5, 7, 7, 12]
    assert [dataset.offsets[i] for i in (0, 2, -1)] == [0, 7, 12]
    assert dataset.offsets[1:3].tolist() == [5, 7]
    assert (dataset.documents, dataset.sequences, dataset.size) == (4, 4, 12)
    assert (dataset.mask, dataset.trained, dataset.fingerprint) == (None, None, None)
    assert dataset.identity() == {"tokens": 12, "documents": 4}
    dataset.verify()


def test_the_ids_are_mapped_not_read(tmp_path: Path) -> None:
    dataset = opened(write(tmp_path / "d", DOCUMENTS))
    assert isinstance(dataset.tokens.base, np.memmap)
    sent = pickle.dumps(dataset)
    assert len(sent) < 500
    assert pickle.loads(sent).tokens[:].tolist() == dataset.tokens[:].tolist()


def test_samples_and_splits(tmp_path: Path) -> None:
    dataset = opened(write(tmp_path / "d", DOCUMENTS))
    assert split_tokens(dataset.offsets, "7,5,0") == {"train": range(7), "valid": range(7, 12),
                                                      "test": range(12, 12)}  # fmt: skip
    samples = WindowSamples(dataset, "train", 3, ratio="1,0,0", shuffle=False)
    batch = samples.batch([0, 1])
    inputs, targets = batch.inputs, batch.targets
    assert inputs.tolist() == [[5, 6, 7], [8, 0, 1]]
    assert targets.tolist() == [[6, 7, 8], [0, 1, 0]]
    documents = DocumentSamples(dataset, "train", 4, ratio="1,0,0", shuffle=False)
    assert documents.batch([0, 1, 2]).inputs.tolist() == [[5, 6, 7, 8], [1, 0, 0, 0], [9, 9, 9, 9]]


@pytest.mark.parametrize("name", ["d", "d.bin", "d.idx"])
def test_a_dataset_is_named_by_prefix_or_file(tmp_path: Path, name: str) -> None:
    write(tmp_path / "d", DOCUMENTS)
    assert megatron_prefix(str(tmp_path / name)) == tmp_path / "d"
    source = open_source(DataConfig(source=str(tmp_path / name)), vocab=10)
    assert (source.name, source.vocab, source.padding) == (str(tmp_path / "d"), 10, 0)


def test_other_names_are_not_datasets(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder.bin").write_bytes(b"")
    (tmp_path / "text.txt").write_text("text")
    for name in ("folder", "text.txt", "text", "nowhere", "nowhere.bin"):
        assert megatron_prefix(str(tmp_path / name)) is None


def test_several_are_joined(tmp_path: Path) -> None:
    write(tmp_path / "a", DOCUMENTS)
    write(tmp_path / "b", [[[3, 0]], [[4, 4, 0]]], code=4)
    source = open_source(DataConfig(source=[str(tmp_path / "a"), str(tmp_path / "b.bin")]), vocab=10)
    joined = [5, 6, 7, 8, 0, 1, 0, 9, 9, 9, 9, 0, 3, 0, 4, 4, 0]
    assert source.tokens[:].tolist() == joined
    assert source.tokens[10:14].tolist() == joined[10:14]
    assert source.tokens[np.array([[0, 12], [16, 11]])].tolist() == [[5, 3], [0, 0]]
    assert source.tokens[3:3].tolist() == []
    assert source.offsets[:].tolist() == [0, 5, 7, 7, 12, 14, 17]
    assert [source.offsets[i] for i in range(-1, len(source.offsets))][:2] == [17, 0]
    assert (source.documents, source.size, source.identity()) == (6, 17, {"tokens": 17, "documents": 6})
    batch = WindowSamples(source, "train", 4, ratio="1,0,0", shuffle=False).batch([0, 2])
    inputs, targets = batch.inputs, batch.targets
    assert inputs.tolist() == [[5, 6, 7, 8], [9, 9, 9, 0]]
    assert targets[1].tolist() == [9, 9, 0, 3]  # the last is of the second dataset
    assert pickle.loads(pickle.dumps(source)).tokens[:].tolist() == joined


def test_text_beside_tokens_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a", DOCUMENTS)
    (tmp_path / "b.txt").write_text("text")
    with pytest.raises(StrettoError, match=r"a, which is tokens already, and .*b\.txt, which is not"):
        open_source(DataConfig(source=[str(tmp_path / "a"), str(tmp_path / "b.txt")]), vocab=10)


def test_the_vocabulary_must_be_known(tmp_path: Path) -> None:
    prefix = write(tmp_path / "d", DOCUMENTS)
    with pytest.raises(StrettoError, match="does not say what vocabulary") as caught:
        open_source(DataConfig(source=str(prefix)))
    assert "data.tokenizer" in str(caught.value.hint)
    assert "model.vocab=N" in str(caught.value.hint)
    with pytest.raises(StrettoError, match=r"token 7 is 9, outside the vocabulary of 9 \(model\.vocab=9\)"):
        open_source(DataConfig(source=str(prefix)), vocab=9)
    source = open_source(DataConfig(source=str(prefix)), vocab=10)
    assert source.text_bytes(range(12)) is None
    assert source.companions() == {}
    with pytest.raises(StrettoError, match="tokenizer that made these ids is not known"):
        source.tokenizer()


def test_negative_ids_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StrettoError, match="token 1 is -1, outside"):
        opened(write(tmp_path / "d", [[[1, -1]]], code=4))


def test_verify_reads_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening reads the ends of large files; verifying reads everything."""
    monkeypatch.setattr(megatron, "_CHUNK", 2)
    dataset = opened(write(tmp_path / "ids", [[[1, 2, 11, 1, 2, 0]]]))
    with pytest.raises(StrettoError, match="token 2 is 11"):
        dataset.verify()
    prefix = write(tmp_path / "order", [[[1]], [[2]], [[3]], [[4]], [[5]], [[6]]])
    data = bytearray(Path(f"{prefix}.idx").read_bytes())
    data[34 + 4 * 6 + 8 * 3] += 2  # the fourth sequence begins elsewhere
    Path(f"{prefix}.idx").write_bytes(data)
    with pytest.raises(StrettoError, match=r"sequence [23] does not follow"):
        opened(prefix).verify()


def broken(prefix: Path, suffix: str, change: Any) -> None:
    path = Path(f"{prefix}{suffix}")
    path.write_bytes(change(bytearray(path.read_bytes())))


def put(at: int, form: str, value: int) -> Any:
    def change(data: bytearray) -> bytearray:
        data[at : at + struct.calcsize(form)] = struct.pack(form, value)
        return data

    return change


LENGTHS, POINTERS, STARTS = 34, 34 + 4 * 4, 34 + 4 * 4 + 8 * 4


@pytest.mark.parametrize(
    ("suffix", "change", "error"),
    [
        (".bin", lambda data: data[:-1], r"d\.bin: truncated: 23 bytes, and d\.idx describes 24"),
        (".bin", lambda data: data + b"00", r"d\.bin: too long"),
        (".idx", lambda data: data[:-1], r"d\.idx: truncated"),
        (".idx", lambda data: data[:20], r"d\.idx: truncated: 20 bytes"),
        (".idx", lambda data: data + b"000", r"d\.idx: too long"),
        (".idx", lambda data: b"TNTIDX\0\0\0" + data[9:], "begins with b'TNTIDX"),
        (".idx", lambda data: b"", "begins with b''"),
        (".idx", put(9, "<Q", 2), "format version 2"),
        (".idx", put(17, "<B", 6), "its values are float64"),
        (".idx", put(17, "<B", 7), "its values are float32"),
        (".idx", put(17, "<B", 9), "its values are type code 9"),
        (".idx", put(18, "<Q", 1 << 60), "truncated"),
        (".idx", put(18, "<Q", 0), "holds no document"),
        (".idx", put(LENGTHS, "<i", 4), "sequence 0 does not follow"),
        (".idx", put(LENGTHS, "<i", -3), "sequence 0 does not follow"),
        (".idx", put(POINTERS, "<q", 2), "sequence 0 does not follow"),
        (".idx", put(POINTERS + 24, "<q", 1 << 40), "sequence 2 does not follow"),
        (".idx", put(STARTS + 8, "<q", 9), "document 1 does not follow"),
        (".idx", put(STARTS + 8, "<q", -9), "document 1 does not follow"),
        (".idx", put(STARTS + 32, "<q", 3), "document 4 does not follow"),
    ],
)
def test_damaged_files_are_one_clear_error(tmp_path: Path, suffix: str, change: Any, error: str) -> None:
    prefix = write(tmp_path / "d", DOCUMENTS)
    broken(prefix, suffix, change)
    with pytest.raises(StrettoError, match=error) as caught:
        opened(prefix)
    assert caught.value.hint


@pytest.mark.parametrize(("gone", "left"), [(".bin", ".idx"), (".idx", ".bin")])
def test_half_a_dataset(tmp_path: Path, gone: str, left: str) -> None:
    prefix = write(tmp_path / "d", DOCUMENTS)
    Path(f"{prefix}{gone}").unlink()
    for name in ("d", f"d{left}"):
        with pytest.raises(StrettoError, match=rf"d\{gone}: missing, and .*d\{left} alone is half"):
            open_source(DataConfig(source=str(tmp_path / name)), vocab=10)


def test_modes_of_text_are_read_and_of_images_refused(tmp_path: Path) -> None:
    assert opened(write(tmp_path / "text", DOCUMENTS, modes=[0, 0, 0, 0])).size == 12
    with pytest.raises(StrettoError, match="multimodal: 1 of 4 sequences are not text"):
        opened(write(tmp_path / "image", DOCUMENTS, modes=[0, 1, 0, 0]))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    Tokenizer.train([Path(__file__).read_text()], 300).save(path)
    return path


TEXTS = ["one text", "", "another, of two\nlines", "   ", "é" * 400]


def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def test_what_is_written_is_megatrons_byte_by_byte(tmp_path: Path, tokenizer: Path) -> None:
    """Documents without text are left out; each other one ends with the end of text."""
    dataset = build_megatron(rows(tmp_path), tmp_path / "out", tokenizer=tokenizer)
    loaded = Tokenizer.load(tokenizer)
    ids = [[[*loaded.encode(text), loaded.endoftext]] for text in TEXTS if text.strip()]
    by_hand = write(tmp_path / "by_hand", ids)
    for suffix in (".bin", ".idx"):
        assert Path(f"{tmp_path}/out{suffix}").read_bytes() == Path(f"{by_hand}{suffix}").read_bytes()
    assert (dataset.fingerprint, dataset.vocab) == (loaded.fingerprint, 300)
    assert dataset.text_bytes(range(dataset.size)) == len("".join(t for t in TEXTS if t.strip()).encode())
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith("out")) == [
        *("out.bin", "out.idx", "out.tokenizer.json", "out.tokenizer_config.json"),
    ]


def test_a_large_vocabulary_takes_int32(tmp_path: Path) -> None:
    """Megatron's builder writes vocabularies from 65,500 on as int32."""
    for size, code in ((65_499, 8), (65_500, 4)):
        vocabulary = {f"w{i}": i for i in range(size - 1)} | {"<|endoftext|>": size - 1}
        model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"}
        added = [{"id": size - 1, "content": "<|endoftext|>", "special": True, "single_word": False,
                  "lstrip": False, "rstrip": False, "normalized": False}]  # fmt: skip
        body = {"version": "1.0", "added_tokens": added, "model": model, "truncation": None, "padding": None,
                "pre_tokenizer": {"type": "Whitespace"}}  # fmt: skip
        path = tmp_path / f"{size}.json"
        path.write_text(json.dumps(body))
        (tmp_path / "text.txt").write_text("w7 w9")
        build_megatron(tmp_path / "text.txt", tmp_path / "out", tokenizer=path, replace=True)
        by_hand = write(tmp_path / "by_hand", [[[7, 9, size - 1]]], code)
        for suffix in (".bin", ".idx"):
            assert Path(f"{tmp_path}/out{suffix}").read_bytes() == Path(f"{by_hand}{suffix}").read_bytes()


def test_the_same_tokens_as_a_token_folder(tmp_path: Path) -> None:
    """Its tokenizer lies beside it, so that nothing need be named."""
    folder = build(rows(tmp_path), tmp_path / "folder", vocab=300)
    build_megatron(rows(tmp_path), tmp_path / "out", vocab=300)
    dataset = open_source(DataConfig(source=str(tmp_path / "out.idx")))
    assert dataset.tokens[:].tolist() == folder.tokens[:].tolist()
    assert dataset.offsets[:].tolist() == folder.offsets[:].tolist()
    assert (dataset.fingerprint, dataset.endoftext) == (folder.fingerprint, folder.endoftext)
    assert dataset.companions() == dict(folder.companions())
    assert dataset.text_bytes(range(9)) == folder.text_bytes(range(9))


def test_a_dataset_is_not_overwritten(tmp_path: Path, tokenizer: Path) -> None:
    build_megatron(rows(tmp_path), tmp_path / "out", tokenizer=tokenizer)
    with pytest.raises(StrettoError, match="there is a Megatron dataset already") as caught:
        build_megatron(rows(tmp_path), tmp_path / "out", tokenizer=tokenizer)
    assert "--force" in str(caught.value.hint)
    build_megatron(rows(tmp_path), tmp_path / "out", tokenizer=tokenizer, replace=True)


def test_training_and_evaluation_without_a_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`model.vocab` is enough; what needs text is left out."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "d", [[[i % 7 for i in range(40)]] for _ in range(20)])
    config = "model: {family: gpt, layers: 1, hidden: 8, heads: 2, vocab: 8}\n"
    config += "data: {source: d, sequence: 8, split: '8,1,1'}\nbatch: {global_size: 2, micro_size: 2}\n"
    config += "train: {steps: 2}\noptim: {rate: {warmup: 0}}\neval: {every: 1, batches: 1}\n"
    (tmp_path / "c.yaml").write_text(config + "run: {name: r}\n")
    assert run(["train", "c.yaml"]) == 0
    shown = capsys.readouterr().out
    assert "800 tokens, vocabulary 8" in shown
    assert "what it writes" not in shown
    assert "stretto generate" not in shown
    assert not (tmp_path / "runs" / "r" / "tokenizer.json").exists()
    assert run(["train", "c.yaml", "train.steps=3", "--resume", "auto"]) == 0
    capsys.readouterr()
    assert run(["evaluate", "runs/r", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 79
    assert run(["generate", "runs/r", "--prompt", "x"]) == 2
    assert "no tokenizer.json" in capsys.readouterr().err


def test_info_and_show(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows(tmp_path)
    command = ["data", "build", "rows.jsonl", "--format", "megatron", "--tokenizer", str(tokenizer)]
    assert run([*command, "--out", "out", "--json"]) == 0
    built = json.loads(capsys.readouterr().out)
    assert (built["documents"], built["vocab"], built["dtype"]) == (3, 300, "uint16")
    assert run(["data", "info", "out.bin", "--verify", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == built | {"schema": "stretto data info/1", "verified": True}
    assert run(["data", "show", "out", "--document", "1"]) == 0
    assert "«another, of two\nlines<|endoftext|>»" in capsys.readouterr().out
    (tmp_path / "out.tokenizer.json").unlink()
    assert run(["data", "info", "out"]) == 0
    assert "not known (name it with --tokenizer)" in capsys.readouterr().out
    assert run(["data", "show", "out"]) == 2
    assert "--tokenizer" in capsys.readouterr().err
    assert run(["data", "show", "out", "--tokenizer", str(tokenizer)]) == 0
    for arguments, error in (
        (["rows.jsonl", "--format", "megatron"], "--format megatron without --out"),
        (["rows.jsonl", "--format", "megatron", "--out", "o", "--chat", "all"], "megatron with --chat"),
    ):
        capsys.readouterr()
        assert run(["data", "build", *arguments]) == 2
        assert error in capsys.readouterr().err
