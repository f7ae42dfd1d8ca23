"""Rows of a table of measured recommenders, converted to jobs that the planner prices."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stretto.planner.machines.catalogue import find_cluster
from stretto.planner.machines.device import Precision
from stretto.recommender.placement import Placements, Split, TableSpec
from stretto.recommender.planner.job import TableJob, table_job
from stretto.recommender.planner.network_times import DenseNetwork, network_of
from stretto.recommender.planner.place import place_tables, price_tables
from stretto.recommender.planner.table_times import TableSoftware, program_of
from stretto.recommender.popularity import Popularity, by_skew
from stretto.recommender.shape import DlrmShape, TableShape, dlrm_preset, table_specs

BY_TABLE: tuple[Split, ...] = ("table", "column")  # splits of NVIDIA's programs
ROWS: tuple[Split, ...] = ("table", "column", "row")  # and TorchRec's

# Merlin's synthetic models: (tables, ids of each of their features, rows, columns) ..., the MLP, numbers of a
# sample, vectors that are averaged; a table shared by two features counts as two. From
# NVIDIA-Merlin/distributed-embeddings, synthetic_models/config_v3.py.
_Group = tuple[int, tuple[int, ...], int, int]
SYNTHETIC: dict[str, tuple[tuple[_Group, ...], tuple[int, ...], int, int]] = {
    "Tiny": (
        (
            *((1, (1, 10), 10**4, 8), (1, (1, 10), 10**6, 16), (1, (1, 10), 25 * 10**6, 16)),
            *((1, (1,), 25 * 10**6, 16), (16, (1,), 10, 8), (10, (1,), 1000, 8), (4, (1,), 10**4, 8)),
            *((2, (1,), 10**5, 16), (19, (1,), 10**6, 16)),
        ),
        *((256, 128, 1), 10, 1),
    ),
    "Small": (
        (
            *((5, (1, 30), 10**4, 16), (3, (1, 30), 4 * 10**6, 32), (1, (1, 30), 5 * 10**7, 32)),
            *((1, (1,), 5 * 10**7, 32), (30, (1,), 10, 16), (30, (1,), 1000, 16), (5, (1,), 10**4, 16)),
            *((5, (1,), 10**5, 32), (27, (1,), 4 * 10**6, 32)),
        ),
        *((512, 256, 128, 1), 10, 1),
    ),
    "Medium": (
        (
            *((20, (1, 50), 10**5, 64), (5, (1, 50), 10**7, 64), (1, (1, 50), 10**8, 128)),
            *((1, (1,), 10**8, 128), (80, (1,), 10, 32), (60, (1,), 1000, 32), (80, (1,), 10**5, 64)),
            *((24, (1,), 2 * 10**5, 64), (40, (1,), 10**7, 64)),
        ),
        *((1024, 512, 256, 128, 1), 25, 7),
    ),
    "Large": (
        (
            *((40, (1, 100), 10**5, 64), (16, (1, 100), 15 * 10**6, 64), (1, (1, 100), 2 * 10**8, 128)),
            *((1, (1,), 2 * 10**8, 128), (100, (1,), 10, 32), (100, (1,), 10**4, 32)),
            *((160, (1,), 10**5, 64), (50, (1,), 5 * 10**5, 64), (144, (1,), 15 * 10**6, 64)),
        ),
        *((2048, 1024, 512, 256, 1), 100, 8),
    ),
    "Jumbo": (
        (
            *((50, (1, 200), 10**5, 128), (24, (1, 200), 2 * 10**7, 128), (1, (1, 200), 4 * 10**8, 256)),
            *((1, (1,), 4 * 10**8, 256), (100, (1,), 10, 32), (200, (1,), 10**4, 64)),
            *((350, (1,), 10**5, 128), (80, (1,), 10**6, 128), (216, (1,), 2 * 10**7, 128)),
        ),
        *((2048, 1024, 512, 256, 1), 200, 20),
    ),
}
_SKEW = 1.05


@dataclass
class Run:
    """A measured row: its cells, its job under each program, and its placement."""

    number: int
    description: str
    program: str
    measured: float
    job: TableJob
    splits: Sequence[Split]
    placements: Placements | None = None

    def predicted(self, program: TableSoftware | None = None) -> float:
        """Samples per second; the placement is computed once, with the first program's profile."""
        job = self.job
        if program is not None:
            job = replace(job, work=replace(job.work, program=program))
        if self.placements is None:
            self.placements = place_tables(job, self.splits).placements
        return price_tables(job, self.placements).samples_per_s


def read_runs(path: Path) -> tuple[list[Run], list[tuple[int, str]]]:
    """Rows of single models with samples per second, and the rejected rows with the reason."""
    runs, refused = list[Run](), list[tuple[int, str]]()
    with path.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.DictReader(file), start=1):
            if not row["samples_per_s"]:
                refused.append((number, "no samples a second"))
                continue
            try:
                runs.append(_run(number, row))
            except LookupError as error:
                refused.append((number, str(error.args[0])))
    return runs, refused


def _run(number: int, row: dict[str, str]) -> Run:
    program = _program(row)
    cluster, ranks = _cluster(row)
    precision = _precision(row)
    batch = int(row["global_batch"] or 65536)
    optimizer = _optimizer(row)
    splits = ROWS if program in ("torchrec", "plain-cpu", "torchrec-cpu") else BY_TABLE
    tables, network, popularity = _model(row)
    room = 1e15 if "synthetic" in row["dataset"] else None  # a shared table counts as two
    half = precision in ("fp16", "bf16")
    job = table_job(
        *(tables, find_cluster(cluster), ranks, batch),
        network=network,
        optimizer=optimizer,
        precision=precision,
        wire_bytes=2 if half else 4,
        program=program_of(program),
        popularity=popularity,
        device_bytes=room,
        places=("device", "cpu") if cluster not in ("cpu", "epyc-7742-2x") else ("device",),
    )
    system = f"{row['system']}, {row['model']} {row['params_b']}, {row['hardware']} {row['accelerators']}"
    return Run(
        number, f"{system}, {row['precision']}, {batch}", program, float(row["samples_per_s"]), job, splits
    )


def _program(row: dict[str, str]) -> str:
    system, here = row["system"], row["source"].startswith("measured here")
    if here:
        if "1 thread" not in row["notes"] or "dense gradients" in row["optimizer"]:
            raise LookupError("several threads a rank, or dense gradients")
        return "torchrec-cpu" if "TorchRec" in system else "plain-cpu"
    if "CPU only" in row["hardware"]:
        return "tensorflow-cpu"
    for start, program in (
        ("NVIDIA TF2", "nvidia-tf2"),
        ("NVIDIA PyTorch", "nvidia-pytorch"),
        ("Merlin", "merlin"),
        ("HugeCTR SOK", "sok"),
        ("TorchRec", "torchrec"),
    ):
        if system.startswith(start):
            if "fused interaction" in row["notes"]:
                raise LookupError("an ablation")
            return program
    raise LookupError("a program that is not known")


def _cluster(row: dict[str, str]) -> tuple[str, int]:
    hardware, count = row["hardware"], int(row["accelerators"] or 0)
    if row["source"].startswith("measured here"):
        return "cpu", int(row["notes"].split()[0])
    if "CPU only" in hardware:
        return "epyc-7742-2x", 1
    for text, name in (
        ("DGX A100", "dgx-a100-80gb"),
        ("A100-80", "dgx-a100-80gb"),
        ("p4d", "aws-p4d"),
        ("A100-40", "dgx-a100-40gb"),
        ("8x A100", "dgx-a100-80gb"),
        ("DGX-1", "dgx-1-v100-32gb"),
        ("DGX-2", "dgx-2-v100-32gb"),
        ("8x V100", "dgx-1-v100-32gb"),
    ):
        if text in hardware:
            return name, count
    raise LookupError(f"hardware {hardware!r}")


def _precision(row: dict[str, str]) -> Precision:
    precision = row["precision"].lower()
    if "CPU only" in row["hardware"] or row["source"].startswith("measured here"):
        return "fp32"
    volta = "V100" in row["hardware"]
    if "amp" in precision:
        return "fp16"
    if not precision and "A100" in row["hardware"] and row["system"].startswith("NVIDIA TF2"):
        return "fp16"  # the comparison with the CPU: its eight-GPU row is the AMP one
    return "fp32" if volta else "tf32"


def _optimizer(row: dict[str, str]) -> str:
    optimizer = row["optimizer"].lower()
    if optimizer.startswith("rowwise"):
        return "rowwise_adagrad"
    if "adagrad" in optimizer:
        return "rowwise_adagrad" if row["system"].startswith("TorchRec") else "adagrad"
    return "lazy_adam" if row["system"] == "NVIDIA TF2 DCNv2" else "sgd"


def _model(row: dict[str, str]) -> tuple[Sequence[TableSpec], DenseNetwork, dict[str, Popularity]]:
    if "synthetic_models" in row["source"]:
        return _synthetic(row["model"].split()[0])
    if row["source"].startswith("measured here"):
        return _here(row)
    size = float(row["table_gib"] or 0)
    shape = dlrm_preset(
        "dlrm-dot" if row["system"].startswith(("TorchRec", "Merlin")) or not size
        else "dlrm-113b" if size > 400 else "dlrm-22.8b" if size > 50 else "dlrm-4.2b"
    )  # fmt: skip
    if "DCNv2" in row["model"]:
        shape = replace(shape, interaction="dcn", cross_layers=3, cross_rank=512)
    specs = [replace(spec, skew=spec.skew or 1.45) for spec in table_specs(shape)]
    return specs, network_of(shape), {}


def _here(row: dict[str, str]) -> tuple[Sequence[TableSpec], DenseNetwork, dict[str, Popularity]]:
    """26 tables of 10^3 to 10^6 rows, evenly spaced in the logarithm."""
    hot = 10.0 if "10 id(s)" in row["dataset"] else 1.0
    skew = 1.05 if "zipf" in row["dataset"] else None
    tables = tuple(TableShape(round(10 ** (3 + 3 * i / 25)), 64, hot, skew) for i in range(26))
    shape = DlrmShape(tables=tables, dense=13, bottom=(512, 256, 64), top=(512, 512, 256, 1))
    return table_specs(shape), network_of(shape), {}


def _synthetic(name: str) -> tuple[Sequence[TableSpec], DenseNetwork, dict[str, Popularity]]:
    groups, top, numbers, stride = SYNTHETIC[name]
    specs = [
        TableSpec(name=f"t{i}", rows=rows, dim=width, hot=float(hot), skew=_SKEW)
        for i, (rows, width, hot) in enumerate(
            (rows, width, hot) for count, hots, rows, width in groups for _ in range(count) for hot in hots
        )
    ]
    wide = sum(spec.dim for spec in specs)
    network = DenseNetwork(
        bottom=(), top=(wide // stride + numbers, *top), wide=wide, vectors=len(specs), interaction="concat"
    )
    return specs, network, {spec.name: by_skew(spec.rows, spec.hot, _SKEW) for spec in specs}
