"""Tokenising text into a token folder beside the `tokenizers` library's own batch encoder.

The text is source code and documentation found on the machine, each file once: no text comes twice, as
words that a tokenizer remembers would flatter it. It is read as JSONL, a file of text a row, and as plain
text, in files of 8 MB. One tokenizer for both, a byte-level BPE trained on a part of it.

`data build` is `stretto data build` in this process: it reads and checks the text, encodes it, and writes
ids, documents' starts and checksums, and syncs. `encode_batch` is the loop that one writes by hand: it reads
the same files, parses rows with `json`, calls `encode_batch_fast` on 1,024 rows at a time (of plain text, on
8 MB cut at line ends into texts of 64 KiB), and writes the ids as uint16 to a file, with an end of text after
each row. Both use all cores. The peak is that of this process beyond its size before.

    python benchmarks/tokenise.py [--rounds 5] [--megabytes 200] [--vocab 32768]
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import tokenizers
from harness import Step, _resident, arguments, race, report

from stretto.run.data.build import build
from stretto.run.data.corpus import find_corpus
from stretto.run.data.tokenizer import Tokenizer

ROOTS = (
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("purelib"),
    "/usr/lib/python3",
    "/usr/share",
    "/usr/include",
)
KINDS = {".py", ".pyi", ".rst", ".md", ".txt", ".html", ".h", ".hpp", ".js", ".yaml"}
ROWS, PLAIN, CUT = 1024, 8 << 20, 64 << 10


def texts(megabytes: int) -> Iterator[str]:
    """Texts of files, each once, by the digest of their names: all kinds of text are everywhere."""
    found = {
        Path(folder, name)
        for root in ROOTS
        for folder, _, names in os.walk(root)
        for name in names
        if Path(name).suffix in KINDS
    }
    seen, left = set[bytes](), megabytes * 1_000_000
    for path in sorted(found, key=lambda path: hashlib.blake2b(str(path).encode()).digest()):
        try:
            data = path.read_bytes()[: 1 << 20]
            text = data.decode()
        except (OSError, UnicodeDecodeError):
            continue
        digest = hashlib.blake2b(data[:4096]).digest()
        if digest in seen or not text.strip():
            continue
        seen.add(digest)
        yield text
        left -= len(data)
        if left <= 0:
            return
    print(f"no more than {megabytes - left // 1_000_000} MB of text were found", file=sys.stderr)


def write(folder: Path, megabytes: int) -> tuple[Path, Path]:
    """The same text as rows, and as plain files."""
    rows, plain = folder / "rows.jsonl", folder / "plain"
    plain.mkdir()
    documents, size, number = list[str](), 0, 0
    with rows.open("w") as file:
        for text in texts(megabytes):
            file.write(json.dumps({"text": text}) + "\n")
            documents.append(text)
            size += len(text)
            if size >= PLAIN:
                (plain / f"{number:03}.txt").write_text("\n".join(documents))
                documents, size, number = [], 0, number + 1
    (plain / f"{number:03}.txt").write_text("\n".join(documents) + "\n")
    return rows, plain


def build_data(source: Path, tokenizer: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        build(source, Path(name, "tokens"), tokenizer=tokenizer)


def encode_batch(source: Path, tokenizer: Path) -> None:
    inner = tokenizers.Tokenizer.from_file(str(tokenizer))
    end = inner.token_to_id("<|endoftext|>")
    with tempfile.TemporaryFile() as out:
        for several in _read(source):
            for encoding in inner.encode_batch_fast(several, add_special_tokens=False):
                out.write(np.array([*encoding.ids, end], dtype=np.uint16).tobytes())


def _read(source: Path) -> Iterator[list[str]]:
    if source.is_file():
        with source.open() as file:
            while lines := list(islice(file, ROWS)):
                yield [json.loads(line)["text"] for line in lines]
        return
    for path in sorted(source.iterdir()):
        text, pieces, at = path.read_text(), list[str](), 0
        while at < len(text):
            stop = text.find("\n", at + CUT)
            stop = len(text) if stop < 0 else stop
            pieces.append(text[at:stop])
            at = stop
        yield pieces


def peak(step: Step) -> float:
    """Megabytes by which this process grows at the peak of a step."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    step()
    return (_resident("VmHWM") - before) / 1e6


def main() -> None:
    args = arguments(__doc__, rounds=5, megabytes=200, vocab=32768)
    with tempfile.TemporaryDirectory() as name:
        rows, plain = write(Path(name), args.megabytes)
        tokenizer = Path(name, "tokenizer.json")
        Tokenizer.train(find_corpus(rows).sample(8_000_000), args.vocab).save(tokenizer)
        for source in (rows, plain):
            size = find_corpus(source).size / 1e6
            contestants: dict[str, Step] = {
                "encode_batch": partial(encode_batch, source, tokenizer),
                "data build": partial(build_data, source, tokenizer),
            }
            timings = race(contestants, "encode_batch", rounds=args.rounds, warmup=1)
            title = f"{size:.0f} MB of {'JSONL' if source is rows else 'plain text'}"
            report(title, timings, "encode_batch", args.out)
            for timing in timings:
                rate, grown = size / timing.median_ms * 1e3, peak(contestants[timing.name])
                print(f"{timing.name}: {rate:.1f} MB/s, {grown:.0f} MB at the peak")
            print(flush=True)


if __name__ == "__main__":
    main()
