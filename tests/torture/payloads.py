"""Hostile files: each would run a command, read a file of someone else's, or write elsewhere, if it could."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import struct
import subprocess
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class _Runs:
    """Unpickled, it calls a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call


def pickles(canary: Path) -> dict[str, bytes]:
    """Pickles that make the canary, plain and in what torch, numpy and archives wrap them in."""
    command = f"touch {canary}"
    code = f"open({str(canary)!r}, 'w')"
    plain = {
        "protocol 0": f"cos\nsystem\n(S'{command}'\ntR.".encode(),
        "exec": pickle.dumps(_Runs(exec, code), 2),
        "eval": pickle.dumps(_Runs(eval, code), 4),
        "popen": pickle.dumps(_Runs(subprocess.Popen, ["touch", str(canary)]), 4),
        "system": pickle.dumps({"state": [1, _Runs(os.system, command)]}, 5),
        "open": pickle.dumps(_Runs(open, str(canary), "w"), 3),
        "getattr": f"cbuiltins\ngetattr\n(cos\npath\nS'os'\ntR(S'system'\ntR(S'{command}'\ntR.".encode(),
        "instance": f"(S'{command}'\nios\nsystem\n.".encode(),
    }
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("archive/data.pkl", plain["system"])
        file.writestr("archive/version", "3\n")
        file.writestr("../../escaped", "x")
        file.writestr(str(canary), "x")
    bundle = io.BytesIO()
    with tarfile.open(fileobj=bundle, mode="w") as file:
        for name in ("../../escaped", str(canary), "pickle"):
            member = tarfile.TarInfo(name)
            member.size = len(plain["system"])
            file.addfile(member, io.BytesIO(plain["system"]))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        file.addfile(link)
    header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(117) + b"\n"
    return {
        **plain,
        "torch archive": archive.getvalue(),
        "tar": bundle.getvalue(),
        "gzip": gzip.compress(plain["system"], mtime=0),
        "numpy": b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + plain["system"],
        "header of 2^63": struct.pack("<Q", 2**63) + b"{}",
        "header of 2^64": struct.pack("<Q", 2**64 - 1) + b'{"a":{}}',
    }


def tagged(canary: Path, secret: Path) -> dict[str, bytes]:
    """YAML that would run code, read a file, or fill the memory."""
    command = f"touch {canary}"
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
    )
    texts = {
        "apply": f"model: !!python/object/apply:os.system ['{command}']",
        "new": f"model: !!python/object/new:subprocess.Popen [['touch', '{canary}']]",
        "exec": f"!!python/object/apply:builtins.exec [\"open('{canary}', 'w')\"]",
        "name": "model: !!python/name:os.system",
        "module": "model: !!python/module:this",
        "tuple": f"model: {{family: !!python/tuple [!!python/object/apply:os.system ['{command}']]}}",
        "include": f"model: !include {secret}",
        "bomb": bomb,
        "recursive": "model: &a [*a]",
        "merge": "model: {<<: {<<: &b {<<: *b}}}",
        "binary": "model: !!binary " + "Y29zCnN5c3RlbQo=",
        "twice": "model: {family: gpt}\nmodel: {family: llama}",
        "deep": "model: " + "[" * 5000,
    }
    return {name: text.encode() for name, text in texts.items()}


TEMPLATES = (
    "{{ cycler.__init__.__globals__.os.popen('touch CANARY').read() }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ self.__init__.__globals__.__builtins__.__import__('os').system('touch CANARY') }}",
    "{{ lipsum.__globals__['os'].system('touch CANARY') }}",
    "{{ request.application.__globals__ }}{{ namespace.__init__.__globals__.os.system('touch CANARY') }}",
    "{% include 'SECRET' %}",
    "{% import 'SECRET' as x %}{{ x }}",
    "{% extends 'SECRET' %}",
    "{{ (messages|attr('__class__')).__base__.__subclasses__() }}",
    "{{ raise_exception.__globals__['__builtins__']['open']('CANARY', 'w') }}",
    "{{ tojson.__func__.__globals__ }}",
    "{{ 'x' * 10**10 }}",
    "{% for a in range(10**9) %}x{% endfor %}",
)


CONTROL = "sealed again"
"""A forged checkpoint in which nothing is wrong: it is read, so that what is wrong with the others is not the
forging.
"""


def elsewhere(secret: Path) -> tuple[str, ...]:
    """Names of files that are not in the folder that they are looked for in."""
    up = "../" * 12
    return (
        str(secret),
        f"{up}{str(secret).lstrip('/')}",
        f"./x/../../{secret.name}",
        f"..\\{secret.name}",
        f"file://{secret}",
        "/dev/zero",
        "/proc/self/mem",
        f"{secret.name}\0.safetensors",
        "~/.ssh/id_rsa",
        "",
        ".",
        "..",
    )


def _checked(text: dict[str, Any]) -> str:
    """A manifest with its own checksum set right, as one who forges it would."""
    bare = {name: value for name, value in text.items() if name != "crc32"}
    written = json.dumps(bare, separators=(",", ":"))
    return json.dumps({**bare, "crc32": f"{zlib.crc32(written.encode()):08x}"}, separators=(",", ":"))


def forged(folder: Path, valid: Path, secret: Path, wrapped: dict[str, bytes]) -> Iterator[tuple[str, Path]]:
    """Checkpoints that name files elsewhere, link to them, or hold pickles."""
    number = 0

    def copy() -> Path:
        nonlocal number
        number += 1
        checkpoint = folder / str(number) / "step-00000001"
        checkpoint.mkdir(parents=True)
        for path in valid.iterdir():
            (checkpoint / path.name).write_bytes(path.read_bytes())
        return checkpoint

    def seal(checkpoint: Path, files: dict[str, Any] | None = None) -> None:
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        sizes = {
            name: [len(data), f"{zlib.crc32(data):08x}"]
            for name in manifest["files"]
            if (checkpoint / name).is_file() and (data := (checkpoint / name).read_bytes()) is not None
        }
        manifest["files"] = sizes if files is None else files
        (checkpoint / "manifest.json").write_text(_checked(manifest))

    checkpoint = copy()
    seal(checkpoint)
    yield CONTROL, checkpoint
    for at, name in enumerate(elsewhere(secret)):
        checkpoint = copy()
        index = json.loads((checkpoint / "metadata.json").read_text())
        index["files"] = [name]
        (checkpoint / "metadata.json").write_text(json.dumps(index))
        seal(checkpoint)
        yield f"index names {at}", checkpoint
        checkpoint = copy()
        files = json.loads((checkpoint / "manifest.json").read_text())["files"]
        seal(
            checkpoint, {**files, name: [len(secret.read_bytes()), f"{zlib.crc32(secret.read_bytes()):08x}"]}
        )
        yield f"manifest names {at}", checkpoint
    for name in ("shard-00000.safetensors", "metadata.json", "manifest.json"):
        checkpoint = copy()
        (checkpoint / name).unlink()
        (checkpoint / name).symlink_to(secret)
        yield f"link for {name}", checkpoint
        checkpoint = copy()
        text = (checkpoint / name).read_text(errors="replace")
        if name.endswith(".json"):
            first = text.index(":")
            (checkpoint / name).write_text(text[: first + 1] + '"x",' + text[1:])  # a name twice
            yield f"twice in {name}", checkpoint
        for kind, data in wrapped.items():
            checkpoint = copy()
            (checkpoint / name).write_bytes(data)
            if name != "manifest.json":
                seal(checkpoint)
            yield f"{kind} for {name}", checkpoint


def published(
    folder: Path, canary: Path, secret: Path, wrapped: dict[str, bytes]
) -> Iterator[tuple[str, Path]]:
    """Folders like those of Hugging Face with code, pickles and names of files elsewhere."""
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 32,
        "vocab_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "rms_norm_eps": 1e-5,
    }

    def make(name: str, **changes: Any) -> Path:
        model_folder = folder / name.replace(" ", "-").replace("/", "_")
        model_folder.mkdir(parents=True)
        (model_folder / "config.json").write_text(json.dumps({**config, **changes}))
        return model_folder

    model_folder = make("code", auto_map={"AutoModelForCausalLM": "modeling_x.X"}, trust_remote_code=True)
    (model_folder / "modeling_x.py").write_text(f"open({str(canary)!r}, 'w')\n")
    yield "code", model_folder
    for kind, data in wrapped.items():
        for name in ("pytorch_model.bin", "model.safetensors"):
            model_folder = make(f"{kind} {name}")
            (model_folder / name).write_bytes(data)
            yield f"{kind} in {name}", model_folder
    for at, name in enumerate(elsewhere(secret)):
        model_folder = make(f"index {at}")
        weights = {"weight_map": {"model.embed_tokens.weight": name}}
        (model_folder / "model.safetensors.index.json").write_text(json.dumps(weights))
        yield f"weights at {at}", model_folder
