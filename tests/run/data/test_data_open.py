"""`open_source`: whatever `data.source` names is opened as one kind of thing, here and on every rank."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stretto.errors import StrettoError
from stretto.run.config.data import DataConfig
from stretto.run.config.sources import holds_tokens
from stretto.run.data.build import build
from stretto.run.data.open import open_source
from stretto.run.data.split import splits_of
from stretto.run.data.token_source import TokenSource


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "one text"}\n{"text": "another"}\n')
    return path


def data_of(tmp_path: Path, source: Path, **more: Any) -> DataConfig:
    return DataConfig(source=str(source), vocab=300, cache=str(tmp_path / "cache"), **more)


def same(first: TokenSource, two: TokenSource) -> bool:
    return (
        first.name,
        first.tokens[:].tolist(),
        first.offsets[:].tolist(),
        first.fingerprint,
        first.identity(),
    ) == (*(two.name, two.tokens[:].tolist(), two.offsets[:].tolist(), two.fingerprint, two.identity()),)


def test_text_is_tokenised_once(tmp_path: Path, text: Path) -> None:
    data = data_of(tmp_path, text)
    stages = list[str]()
    source = open_source(data, report=lambda at: stages.append(at.stage))
    assert stages[-1] == "encode"
    stages.clear()
    assert same(source, open_source(data, report=lambda at: stages.append(at.stage)))
    assert not stages
    assert not holds_tokens(data.sources)
    assert (source.documents, source.size) == (2, len(source.tokens))
    assert source.identity() == {"tokens": source.size, "documents": 2}


def test_a_token_folder_is_opened_as_it_is(tmp_path: Path, text: Path) -> None:
    folder = build(text, tmp_path / "out", vocab=300)
    data = data_of(tmp_path, folder.path)
    assert holds_tokens(data.sources)
    assert same(open_source(data), folder)
    assert not (tmp_path / "cache").exists()
    (folder.path / "tokens.bin").write_bytes(b"")
    with pytest.raises(StrettoError, match="truncated"):
        open_source(data)


def test_token_folders_are_joined_in_the_order_of_the_splits_that_they_are_named_after(
    tmp_path: Path, text: Path
) -> None:
    sizes, tokenizer = dict[str, int](), tmp_path / "tokenizer.json"
    tokenizer.write_bytes(build(text, cache=tmp_path / "cache", vocab=300).tokenizer().to_bytes())
    for number, name in enumerate(("valid", "train"), 1):
        text.write_text(f'{{"text": "{name * number}"}}\n')
        sizes[name] = build(text, tmp_path / name, tokenizer=tokenizer).size
    data = DataConfig(source=[str(tmp_path / name) for name in sizes])
    joined = open_source(data)
    assert isinstance(joined, TokenSource)
    assert joined.name == f"{tmp_path}/train, {tmp_path}/valid"
    expected = {"train": range(sizes["train"]), "valid": range(sizes["train"], joined.size)}
    expected["test"] = range(joined.size, joined.size)
    assert splits_of(pickle.loads(pickle.dumps(joined)), data.split) == splits_of(joined, None) == expected
    assert open_source(replace(data, split="1,1,0")).name == ", ".join(data.sources)  # as listed
    (tmp_path / "both").mkdir()
    for name in sizes:
        (tmp_path / "both" / f"{name}.txt").write_text(name)
    both = build(tmp_path / "both", tmp_path / "tokens", tokenizer=tokenizer, by_name=True)
    with pytest.raises(StrettoError, match="keeps training and held-out text apart"):
        open_source(replace(data, source=[str(both.path), *data.sources]))


def test_a_rank_opens_the_files_itself(tmp_path: Path, text: Path) -> None:
    source = open_source(data_of(tmp_path, text))
    sent = pickle.dumps(source)
    assert len(sent) < 1000  # the tokens are not in it
    assert same(pickle.loads(sent), source)
    assert set(source.companions()) == {"tokenizer.json", "tokenizer_config.json"}
