"""Every parser of what users and other programs write, with valid input to start from."""

from __future__ import annotations

import json
import random
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mutations import as_json, as_yaml, broken, lines

from texts import open_tokens

HERE = Path(__file__).parents[2]
Make = Callable[[random.Random], bytes]


@dataclass(frozen=True)
class Parser:
    """What reads a file.

    Attributes:
        make: hostile content.
        read: reads the file.
        file: its name.
        valid: content that is read.
    """

    make: Make
    read: Callable[[Path], object]
    file: str
    valid: bytes


PARSERS: dict[str, Callable[[Path], Parser]] = {}
Entry = Callable[[Path], Parser]


def parser(entry: Entry) -> Entry:
    PARSERS[entry.__name__.replace("_", " ")] = entry
    return entry


def _yaml(text: str, read: Callable[[Path], object]) -> Parser:
    import yaml

    document: Any = yaml.safe_load(text)
    return Parser(lambda draw: as_yaml(document, draw), read, "file.yaml", text.encode())


def _json(document: Any, read: Callable[[Path], object], file: str = "file.json") -> Parser:
    return Parser(lambda draw: as_json(document, draw), read, file, json.dumps(document).encode())


@parser
def config(folder: Path) -> Parser:
    from stretto.recommender.config.load import load_config
    from tiny_job import job_text

    return _yaml(job_text(folder), load_config)


@parser
def recommender_config(_: Path) -> Parser:
    from stretto.recommender.config.load import load_config

    return _yaml((HERE / "configs/dlrm.yaml").read_text(), load_config)


@parser
def overrides(_: Path) -> Parser:
    from stretto.recommender.config.load import load_config

    examples = ["optim.lr=3e-4", "layout.dp=2", "model.layers=3", "data.source={a: 0.5, b: 0.5}"]
    examples += [
        "schedule.name=zb-h1",
        "train.dtype=bfloat16",
        'finetune.freeze=["embed.*"]',
        "optim.clip=null",
    ]

    def make(draw: random.Random) -> bytes:
        table = lines([[*word.partition("=")] for word in draw.sample(examples, 3)], "")
        return table(draw)

    def read(path: Path) -> object:
        given = path.read_bytes().decode("utf-8", "surrogateescape").split("\n")
        return load_config(HERE / "configs/quickstart.yaml", given)

    return Parser(make, read, "words", "\n".join(examples[:3]).encode())


@parser
def program_as_json(_: Path) -> Parser:
    from stretto import schedule
    from stretto.program.text.json_format import to_json
    from stretto.program.text.read import read_program

    document = json.loads(to_json(schedule("interleaved", 2, 4)))
    return _json(document, lambda path: read_program(path))


@parser
def program_as_csv(_: Path) -> Parser:
    from stretto import schedule
    from stretto.program.text.read import read_program
    from stretto.program.text.torch_csv import to_csv

    text = to_csv(schedule("1f1b", 3, 4))
    rows = [line.split(",") for line in text.splitlines()]
    return Parser(lines(rows, ","), lambda path: read_program(path), "file.csv", text.encode())


@parser
def model_config(_: Path) -> Parser:
    from stretto.job.huggingface import config_to_huggingface
    from stretto.job.huggingface.read import read_shape
    from stretto.job.presets import preset

    names = ["llama3-8b", "gpt2", "mixtral-8x7b", "gemma3-4b", "deepseek-v3", "gpt-oss-20b", "qwen3-30b-a3b"]
    documents = [config_to_huggingface(preset(name)) for name in names]
    valid = json.dumps(documents[0]).encode()
    return Parser(lambda draw: as_json(draw.choice(documents), draw), read_shape, "config.json", valid)


@parser
def cluster(_: Path) -> Parser:
    from stretto.planner.machines.catalogue import read_cluster

    text = """
device:
  name: mine
  memory_gib: 80
  bandwidth_gbs: 3350
  tflops: {bf16: 989, fp32: 67}
node: 8
nodes: 2
inner: {kind: NVLink 4, bandwidth_gbs: 450, latency_us: 3}
outer: 8x400 Gb/s InfiniBand
host: {memory_gib: 2000, bandwidth_gbs: 400, link_gbs: 50}
notes: of a vendor
"""
    return _yaml(text, read_cluster)


@parser
def profile(_: Path) -> Parser:
    from stretto.errors import read_text
    from stretto.planner.cutting.profile import read_profile

    row = {"name": "a", "forward_s": 0.01, "backward_s": 0.02, "parameter_bytes": 10}
    document = {"layers": [row, row, row], "shared": [{"layers": [0, 2], "bytes": 8}], "about": "x"}
    return _json(document, lambda path: read_profile(read_text(path), str(path)))


@parser
def token_index(folder: Path) -> Parser:
    from stretto.run.data.token_folder import INDEX, parse_index
    from tiny_job import job

    open_tokens(job(folder))
    index = next((folder / "cache").rglob(INDEX))
    document = json.loads(index.read_bytes())
    return _json(document, lambda path: parse_index(path.read_bytes(), path))


@parser
def megatron_index(folder: Path) -> Parser:
    from stretto.run.data.megatron import DatasetVocabulary, MegatronDataset

    sizes, documents = [3, 4, 5], [0, 1, 3]
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(sizes), len(documents))
    pointers = [0, 6, 14]
    valid = head + struct.pack("<3i3q3q", *sizes, *pointers, *documents)
    (folder / "tokens.bin").write_bytes(struct.pack("<12H", *range(12)))

    def read(path: Path) -> object:
        (folder / "tokens.idx").write_bytes(path.read_bytes())
        opened = MegatronDataset(folder / "tokens", DatasetVocabulary(size=50))
        opened.verify()
        return opened

    return Parser(lambda draw: broken(valid, draw), read, "x.idx", valid)


def _tokenizer() -> Any:
    vocab = {chr(97 + at): at for at in range(26)} | {"ab": 26, "abc": 27, "<|endoftext|>": 28}
    special = {"id": 28, "content": "<|endoftext|>", "single_word": False, "lstrip": False, "rstrip": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**special, "normalized": False, "special": True}],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [["a", "b"], ["ab", "c"]],
        },
    }


@parser
def tokenizer(_: Path) -> Parser:
    from stretto.run.data.remote import load_tokenizer

    def read(path: Path) -> object:
        loaded = load_tokenizer(path)
        return loaded.vocab_size, loaded.encode("abc"), loaded.endoftext

    return _json(_tokenizer(), read, "tokenizer.json")


@parser
def chat_template(folder: Path) -> Parser:
    from chats import SPECIAL, TEMPLATES, chat
    from stretto.errors import StrettoError
    from stretto.run.data import chat_template
    from stretto.run.data.chat_template import ChatTemplate
    from stretto.run.data.conversation import Conversation, mark, parse_row

    chat_template.SECONDS = 1
    row = {"messages": chat(2), "tools": [{"type": "function"}], "chat_template_kwargs": {"a": 1}}
    named = [
        {"name": "default", "template": TEMPLATES["llama3"]},
        {"name": "tool_use", "template": "{{ tools }}"},
    ]
    token = {"__type": "AddedToken", "content": SPECIAL["llama3"][4]}
    document = {"chat_template": named, "bos_token": SPECIAL["llama3"][0], "eos_token": token, "row": row}
    pieces = re.split(r"({[{%].*?[%}]})", TEMPLATES["llama3"], flags=re.DOTALL)
    hostile = [
        "{% for a in range(99999) %}",
        "{% endfor %}",
        "{% set messages = messages + messages %}",
        "{{ loop }}",
    ]
    hostile += [
        "{{ ('a' * 999) | center(3000000000) }}",
        "{{ messages }}",
        "{% generation %}",
        "{{ '%9999999999d' % 1 }}",
    ]
    hostile += [
        "{% macro f() %}",
        "{% endmacro %}",
        "{{ f() }}",
        "{{ ''.__class__ }}",
        "{{ " + "(" * 3000,
        "{#",
        "\0\ud800",
    ]

    def make(draw: random.Random) -> bytes:
        if draw.random() < 0.4:
            return as_json(document, draw)
        text = list(pieces)
        for _ in range(draw.randint(1, 4)):
            text.insert(draw.randrange(len(text)), draw.choice(hostile + pieces))
            del text[draw.randrange(len(text))]
        return json.dumps({**document, "chat_template": "".join(text)}).encode()

    def read(path: Path) -> object:
        template = ChatTemplate.load(path)
        rows = parse_row(json.loads(path.read_bytes()).get("row") or {}, "row")
        if isinstance(rows, Conversation):
            for train_on in ("assistant", "all"):
                (answer,) = mark([rows], template, train_on)
                if isinstance(answer, StrettoError):
                    raise answer
        return template

    return Parser(
        make,
        read,
        "tokenizer_config.json",
        json.dumps({**document, "chat_template": TEMPLATES["llama3"]}).encode(),
    )


def _checkpoint(folder: Path) -> Path:
    import torch

    from stretto.engine.checkpoint.save import save
    from stretto.engine.parallel.fragment import ShardPlacement

    value = torch.arange(6.0).view(2, 3)
    tensors = {
        name: (value, ShardPlacement.unsharded(name, (2, 3))) for name in ("model.a", "optim.exp_avg.a")
    }
    sizes = {"family": "dlrm", "bottom": [4, 2], "tables": {"C1": {"rows": 3}}}
    return save(folder, 3, tensors, {"step": 3, "samples": 12, "model": sizes, "loss": 1.5})


def _replaced(path: Path, checkpoint: Path, name: str) -> None:
    """Put the file into the checkpoint; unless it is the manifest, with the checksums of an attacker."""
    import zlib
    from dataclasses import replace

    from stretto.engine.checkpoint.files import FileEntry
    from stretto.engine.checkpoint.manifest import MANIFEST, load_manifest, write_manifest

    data = path.read_bytes()
    (checkpoint / name).write_bytes(data)
    if name != MANIFEST:
        manifest = load_manifest(checkpoint)
        manifest = replace(manifest, files={**manifest.files, name: FileEntry(len(data), zlib.crc32(data))})
        (checkpoint / MANIFEST).unlink()
        write_manifest(checkpoint, manifest)


@parser
def manifest(folder: Path) -> Parser:
    from stretto.engine.checkpoint import manifest as module
    from stretto.engine.checkpoint.files import dump_json
    from stretto.run.train.resume import read_meta

    checkpoint = _checkpoint(folder)
    valid = (checkpoint / module.MANIFEST).read_bytes()
    document = json.loads(valid)

    def make(draw: random.Random) -> bytes:
        data = as_json(document, draw)
        try:
            body = json.loads(data)
            body.pop("crc32", None)
            return dump_json({**body, "crc32": module._crc(body)})  # as an attacker would
        except (ValueError, AttributeError, TypeError, RecursionError):
            return data

    def read(path: Path) -> object:
        _replaced(path, checkpoint, module.MANIFEST)
        module.problems(checkpoint)
        return read_meta(checkpoint, ("step", "samples"))

    return Parser(make, read, "m.json", valid)


@parser
def run_metadata(folder: Path) -> Parser:
    from run_checkpoints import META, forge, run_checkpoint
    from stretto.engine.checkpoint.manifest import problems, read_manifest
    from stretto.engine.checkpoint.read import shape_of
    from stretto.errors import StrettoError
    from stretto.run.train.checkpointing import restored_progress
    from stretto.run.train.resume import read_meta

    checkpoint = run_checkpoint(folder)

    def read(path: Path) -> object:
        try:
            meta = json.loads(path.read_bytes())
            forge(checkpoint, meta=meta)
        except (ValueError, RecursionError) as error:  # no manifest can hold it
            raise StrettoError(str(error)) from None
        if wrong := problems(checkpoint):
            raise StrettoError(wrong[0])
        read_again = read_meta(checkpoint, ("step", "samples", "tokens"))
        return shape_of(checkpoint, read_manifest(checkpoint).meta), restored_progress(read_again, 4)[
            "counted_from"
        ]

    return _json(META, read)


@parser
def checkpoint_index(folder: Path) -> Parser:
    from stretto.engine.checkpoint.index import INDEX
    from stretto.engine.checkpoint.manifest import problems, read_manifest, read_tensors

    checkpoint = _checkpoint(folder)

    def read(path: Path) -> object:
        _replaced(path, checkpoint, INDEX)
        problems(checkpoint)
        return read_tensors(checkpoint, read_manifest(checkpoint))

    return _json(json.loads((checkpoint / INDEX).read_bytes()), read)


@parser
def safetensors(folder: Path) -> Parser:
    import torch
    from safetensors.torch import save_file

    from stretto.engine.checkpoint.huggingface.importing import Importing
    from stretto.engine.models import build, initialise
    from stretto.engine.models.huggingface import to_huggingface
    from stretto.job.huggingface import config_to_huggingface
    from stretto.job.shape import ModelShape

    shape = ModelShape(family="llama", layers=1, hidden=8, heads=2, kv_heads=1, ffn=8, vocab=16, sequence=8)
    model = build(shape)
    model.to_empty(device="cpu")
    initialise(model, 0)
    (folder / "config.json").write_text(json.dumps(config_to_huggingface(shape)))
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    save_file(dict(to_huggingface(weights, shape)), folder / "model.safetensors")
    valid = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(valid[:8], "little")
    header, body = json.loads(valid[8 : 8 + size]), valid[8 + size :]

    def make(draw: random.Random) -> bytes:
        if draw.random() < 0.3:
            return broken(valid, draw)
        data = as_json(header, draw)
        return len(data).to_bytes(8, "little") + data + body

    def read(path: Path) -> object:
        (folder / "model.safetensors").write_bytes(path.read_bytes())
        with Importing(folder) as opened:
            return opened.dtype, torch.float32

    return Parser(make, read, "x.safetensors", valid)


@parser
def prediction_table(_: Path) -> Parser:
    from stretto.planner.run_scores import predict_rows, read_table
    from stretto.planner.runs import read_run

    names = ["model", "gpu", "gpus", "tp", "pp", "dp", "batch", "micro_batch", "seq", "precision"]
    row = ["llama3-8b", "H100", "8", "2", "2", "2", "64", "1", "4096", "bf16"]

    def read(path: Path) -> object:
        return list(predict_rows(read_table(path), read_run))

    valid = "\n".join(map(",".join, (names, row)))
    return Parser(lines([names, row], ","), read, "file.csv", valid.encode())


@parser
def click_log(_: Path) -> Parser:
    from stretto.recommender.clicks.criteo import parse

    row = ["1", *map(str, range(13)), *(f"{at:08x}" for at in range(26))]
    valid = "\n".join("\t".join(row) for _ in range(3)).encode()
    return Parser(lines([row] * 3, "\t"), lambda path: parse(path.read_bytes()), "clicks.tsv", valid)


def _documents(path: Path) -> object:
    from stretto.run.config.data import ReadOptions
    from stretto.run.data.readers import read_documents
    from stretto.run.data.row_errors import RowErrors

    counts = list[int]()
    for on_error in ("skip", "stop"):
        pieces = read_documents(path, path.name, ReadOptions(on_error=on_error), RowErrors(on_error=on_error))
        counts.append(sum(len(piece.text.encode()) for piece in pieces))
    return counts


@parser
def rows_of_text(folder: Path) -> Parser:
    """Files without a name that says their format, so that the content decides, or asks."""
    rows: list[Any] = [{"id": at, "text": f"text {at}"} for at in range(4)]
    table = lines([["id", "text"], *([str(at), f'"text, {at}"'] for at in range(4))], ",")
    array, by_line = as_json, "\n".join(map(json.dumps, rows)).encode()

    def make(draw: random.Random) -> bytes:
        names = ("file.json", "file.jsonl", "file.csv", "file.tsv", "file.txt", "file.parquet")
        (folder / "name").write_text(draw.choice(names))
        match draw.randrange(4):
            case 0:
                return array(rows, draw)
            case 1:
                return table(draw)
            case 2:
                return b"\n".join(as_json(row, draw) for row in rows)
            case _:
                return broken(by_line, draw)

    def read(path: Path) -> object:
        name = folder / "name"
        renamed = path.rename(folder / (name.read_text() if name.exists() else "file.jsonl"))
        try:
            return _documents(renamed)
        finally:
            renamed.rename(path)

    return Parser(make, read, "file", by_line)


@parser
def packed_rows(_: Path) -> Parser:
    import bz2
    import gzip
    import lzma

    text = b"\n".join(json.dumps({"text": f"text {at}"}).encode() for at in range(50))
    packed = [gzip.compress(text, mtime=0), bz2.compress(text), lzma.compress(text)]
    packed += [b"\x28\xb5\x2f\xfd" + text, gzip.compress(b" " * (1 << 26), mtime=0)]
    return Parser(lambda draw: broken(draw.choice(packed), draw), _documents, "file.jsonl", packed[0])
