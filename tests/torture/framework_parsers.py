"""Parsers of other frameworks' scripts and configs, as `parsers` has them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mutations import as_json, broken, document, lines
from parsers import PARSERS, Parser, parser

__all__ = ["PARSERS"]

SCRIPT = """#!/bin/bash
GPUS=${GPUS:-8}
SIZES=(--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32)
if [[ "$GPUS" == "8" ]] && [ -z "$MORE" ]; then echo "SIZES+=(--bf16)"; else exit 1; fi
[ -d "$2" ] && { mkdir ${TP:=2}; }
SIZES+=(--swiglu '--bf16')  # both
eval torchrun --nproc-per-node $GPUS pretrain_gpt.py --train-iters ${STEPS:-$((5 * 2))} \\
    "${SIZES[@]}" --max-position-embeddings 32 --vocab-size ${VOCAB:-500} --lr 1e-3 \\
    --data-path a.`date` --micro-batch-size 1 --global-batch-size 8 --tensor-model-parallel-size ${TP:-1}
"""
TWISTED = [
    "$",
    "${",
    "$((",
    "`",
    "'",
    '"',
    "\\",
    "(",
    ")",
    "{",
    "}",
    "[[",
    "&&",
    "fi",
    "done",
    "<<EOF",
    "if",
]


@parser
def megatron_script(_: Path) -> Parser:
    from stretto_interop.frameworks.mapping import Start
    from stretto_interop.frameworks.megatron.framework import MEGATRON
    from stretto_interop.frameworks.migrate import migrate

    rows = [line.split(" ") for line in SCRIPT.splitlines()]

    def make(draw: random.Random) -> bytes:
        changed = [list(row) for row in rows]
        for _ in range(draw.choice((1, 2, 5))):
            row = draw.choice(changed)
            word = draw.choice((*TWISTED, "A=$A$A$A$A$A$A$A$A$A", "x" * 3000, draw.choice(draw.choice(rows))))
            row.insert(draw.randrange(len(row) + 1), word * draw.choice((1, 1, 3, 400)))
        return lines(changed, " ")(draw)

    def read(path: Path) -> object:
        text = path.read_bytes().decode("utf-8", "surrogateescape")
        return migrate(MEGATRON, text, "run.sh", Start(devices=8, arguments=["--tp", "2"]))

    return Parser(make, read, "run.sh", SCRIPT.encode())


def _job() -> Any:
    from stretto.job.data_parallel import DataParallelSettings, Precision
    from stretto.job.job import Job
    from stretto.job.presets import preset
    from stretto.layout.layout import Layout

    return Job(
        shape=preset("llama3-8b"),
        layout=Layout(dp=8),
        global_batch=64,
        sequence=4096,
        dp=DataParallelSettings(mode="zero2"),
        precision=Precision(dtype="bfloat16"),
    )


def _reads(name: str, source: str) -> Callable[[Path], object]:
    from stretto_interop.frameworks.fields import values_of
    from stretto_interop.frameworks.mapping import read
    from stretto_interop.frameworks.registry import framework

    values = values_of(_job()).values
    names = ("model.", "data.sequence", "data.target_sequence")
    other_settings = {field: value for field, value in values.items() if field.startswith(names)}

    def reads(path: Path) -> object:
        text = path.read_bytes().decode("utf-8", "surrogateescape")
        return read(framework(name), text, source, 8, other_settings)

    return reads


@parser
def deepspeed_json(_: Path) -> Parser:
    from stretto_interop.frameworks.deepspeed import DEEPSPEED
    from stretto_interop.frameworks.mapping import emit

    written = json.loads(emit(DEEPSPEED, _job()).replace('"auto"', "0.1"))
    return Parser(
        lambda draw: as_json(written, draw),
        _reads("deepspeed", "ds.json"),
        "ds.json",
        json.dumps(written).encode(),
    )


@parser
def torchtitan_toml(_: Path) -> Parser:
    sections: dict[str, dict[str, Any]] = {
        "model": {"name": "llama3", "flavor": "8B", "converters": ["float8"]},
        "optimizer": {"name": "AdamW", "lr": 3e-4, "eps": 1e-8},
        "lr_scheduler": {
            "warmup_steps": 20,
            "decay_ratio": 0.5,
            "decay_type": "linear",
            "min_lr_factor": 0.1,
        },
        "training": {"local_batch_size": 1, "seq_len": 8192, "max_norm": 1.0, "steps": 10, "dataset": "c4"},
        "parallelism": {"data_parallel_shard_degree": -1, "tensor_parallel_degree": 2},
        "activation_checkpoint": {"mode": "full"},
        "float8": {"recipe_name": "rowwise"},
    }

    def text(document: Any) -> str:
        lines = list[str]()
        for section, inside in document.items() if isinstance(document, dict) else [("x", document)]:
            lines.append(f"[{section}]" if isinstance(inside, dict) else f"{section} = {json.dumps(inside)}")
            pairs = inside.items() if isinstance(inside, dict) else ()
            lines += [f"{key} = {json.dumps(value)}" for key, value in pairs]
        return "\n".join(lines)

    def make(draw: random.Random) -> bytes:
        data = text(document(sections, draw)).encode("utf-8", "surrogatepass")
        return broken(data, draw) if draw.random() < 0.3 else data

    return Parser(make, _reads("torchtitan", "run.toml"), "run.toml", text(sections).encode())


VALUES = [
    "-" * 3000 + "1",
    "(" * 200,
    "1/0",
    "[]",
    "{[]: 1}",
    "None",
    "9**9**9",
    "1e999",
    "'a'*9",
    "x.y",
    "*",
    "=",
]


@parser
def torchtitan_module(_: Path) -> Parser:
    from stretto_interop.frameworks.mapping import emit
    from stretto_interop.frameworks.torchtitan import TORCHTITAN

    code = emit(TORCHTITAN, _job())
    rows = [line.split(" ") for line in code.splitlines()]

    def make(draw: random.Random) -> bytes:
        changed = [list(row) for row in rows]
        for _ in range(draw.choice((1, 2, 5))):
            row = draw.choice([row for row in changed if any("=" in word for word in row)])
            at = draw.choice([at for at, word in enumerate(row) if "=" in word])
            row[at] = f"{row[at].partition('=')[0]}={draw.choice(VALUES)},"
        text = "\n".join(map(" ".join, changed)).encode()
        return broken(text, draw) if draw.random() < 0.2 else text

    return Parser(make, _reads("torchtitan", "run.py"), "run.py", code.encode())
