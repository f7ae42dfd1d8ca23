"""`stretto plan` of a recommender: where its tables go, and the samples a second that come of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.cli.face import report, say_no, write_text
from stretto.errors import StrettoError, nearest

if TYPE_CHECKING:
    from stretto.config.recommender.schema import RecommenderConfig
    from stretto.cost.machine.cluster import Cluster
    from stretto.layout.tables import Split
    from stretto.plan.tables.job import TableJob

GIB = 2**30
_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp64": 8}
_FIXES = (
    "split",
    "place",
    "optimizer",
    "program",
    "wire",
    "weight",
    "ranks_per_node",
    "device_gib",
    "host_gib",
)
_FIXES_SAID = ", ".join(_FIXES)


@dataclass(frozen=True)
class Asked:
    """What the command's options say; None: nothing."""

    model: str | None
    cluster: str | None
    batch: int | None
    fix: Sequence[str]
    precision: str | None
    placement: Path | None
    write: Path | None


def is_recommender_plan(config: str | None, overrides: Sequence[str], model: str | None) -> bool:
    """Whether a recommender is to be planned: by --model, else by the config."""
    from stretto.cost.dlrm import is_dlrm

    if model is not None or config is None:
        return model is not None and is_dlrm(model)
    from stretto.config.load import read_config, values_of
    from stretto.config.recommender.which import is_recommender

    values, _ = values_of(read_config(Path(config)), config)
    return is_recommender(values, overrides)


def plan_tables(
    config: str | None,
    overrides: Sequence[str],
    asked: Asked,
    others: Mapping[str, object],
    as_json: bool,
) -> None:
    """Place the tables, or price a placement file, and tell what comes of it.

    Args:
        others: options that only language models have, those that were given.
    """
    from stretto.cli.plan_tables_show import facts, show
    from stretto.plan.tables.file import placements_to_yaml, read_placements
    from stretto.plan.tables.place import SPLITS, NoRoom, place_tables, price_tables

    for name, value in others.items():
        if value:
            raise StrettoError(f"--{name} is for language models, not for a recommender", hint="leave it out")
    fixes = _fixes(asked.fix)
    known, job = _job(config, overrides, asked, fixes)
    try:
        if asked.placement is not None:
            work = job.work
            found = price_tables(job, read_placements(asked.placement, work.ranks, work.local))
        else:
            fixed = fixes.get("split")
            splits: list[Split] = [split for split in SPLITS if fixed is None or split in fixed]
            found = place_tables(job, splits)
    except NoRoom as error:
        if not as_json:
            raise
        report(
            {"model": known, "fits": False, "error": error.message, "hint": error.hint}, True, lambda _: None
        )
        raise say_no() from None
    if asked.write is not None:
        about = (
            f"{known} on {job.work.ranks} x {job.work.cluster.device.name}, {job.work.batch} samples a step\n"
            f"predicted: {found.samples_per_s:,.0f} samples/s; tables.placement takes this file, also edited"
        )
        text = placements_to_yaml(found.placements, job.work.ranks, job.work.local, about, found.why)
        write_text(asked.write, text)
    told = facts(known, found, asked.write)
    report(told, as_json, lambda to: show(to, known, found, asked.write))
    if found.over:
        raise say_no()


# ---------------------------------------------------------------------- what was asked


def _job(
    config: str | None, overrides: Sequence[str], asked: Asked, fixes: Mapping[str, tuple[str, ...]]
) -> tuple[str, TableJob]:
    """The model's name, and the job."""
    from stretto.cost.dlrm import dlrm_preset, table_specs
    from stretto.cost.time.network import network_of
    from stretto.cost.time.tables import program_of
    from stretto.layout.tables import physical_tables
    from stretto.plan.tables.job import table_job

    known = _known(fixes, asked.precision)
    if config is None:
        assert asked.model is not None
        if asked.batch is None:
            raise StrettoError("--batch is missing", hint=f"as in --model {asked.model} --batch 65536")
        shape = dlrm_preset(asked.model)
        cluster, ranks = _cluster(asked.cluster, None)
        network, tables = network_of(shape), table_specs(shape)
        return asked.model.lower(), table_job(tables, cluster, ranks, asked.batch, network=network, **known)
    job = _config(config, overrides)
    cluster, ranks = _cluster(asked.cluster, job.layout.ranks)
    specs = job.table_specs()
    usual: dict[str, Any] = {
        "optimizer": job.optim.tables.name,
        "weight_bytes": 8 if job.train.dtype == "float64" else 4,
        "wire_bytes": 8 if job.train.dtype == "float64" else 4 if job.tables.wire == "float32" else 2,
        "ranks_per_node": job.layout.ranks_per_node,
        "places": None if job.tables.place is None else [job.tables.place],
        "device_bytes": job.tables.device_gib and job.tables.device_gib * GIB,
        "host_bytes": job.tables.host_gib and job.tables.host_gib * GIB,
    }
    if not job.tables.overlap:
        usual["program"] = replace(program_of("stretto"), ahead=False, beside=False)
    batch = asked.batch or job.batch.global_size
    network = network_of(job.shape(specs))
    return Path(config).stem, table_job(
        physical_tables(specs), cluster, ranks, batch, network=network, **(usual | known)
    )


def _config(config: str, overrides: Sequence[str]) -> RecommenderConfig:
    from stretto.config.recommender.load import load_any
    from stretto.config.recommender.schema import RecommenderConfig

    found = load_any(config, overrides)
    assert isinstance(found, RecommenderConfig)
    return found


def _cluster(name: str | None, ranks: int | None) -> tuple[Cluster, int]:
    """The cluster, and how many ranks: as many as its name says, else the config's, else a node of them."""
    from stretto.cost.machine.catalogue import find_cluster

    if name is None:
        if ranks is None:
            raise StrettoError("--cluster is missing", hint="as in --cluster dgx-a100, or dgx-a100:16")
        name = "here"
    plain, colon, size = name.rpartition(":")
    cluster = find_cluster(plain if colon and size.isdigit() else name)
    found = int(size) if colon and size.isdigit() else ranks or cluster.devices or cluster.node
    if found < 1:
        raise StrettoError(f"--cluster {name!r} has no device", hint="as in dgx-a100:8")
    cluster.sized(found)  # which says where it has fewer
    return cluster, found


def _fixes(given: Sequence[str]) -> dict[str, tuple[str, ...]]:
    found = dict[str, tuple[str, ...]]()
    for text in given:
        name, equals, values = text.partition("=")
        if not equals or not values:
            raise StrettoError(f"--fix {text!r} is no choice", hint="as in --fix split=row,data")
        if name not in _FIXES:
            near = nearest(name, _FIXES)
            hint = f"did you mean {near!r}? " * bool(near) + f"of a recommender: {_FIXES_SAID}"
            raise StrettoError(f"--fix {text!r}: there is no choice {name!r}", hint=hint)
        found[name] = tuple(value.strip() for value in values.split(","))
    return found


def _known(fixes: Mapping[str, tuple[str, ...]], precision: str | None) -> dict[str, Any]:
    """Arguments of `table_job` that the command's options say."""
    from stretto.layout.tables import PLACES, SPLITS

    found = dict[str, Any]()
    for name, allowed in (("split", SPLITS), ("place", PLACES), ("wire", _BYTES), ("weight", _BYTES)):
        for value in fixes.get(name, ()):
            if value not in allowed:
                near = nearest(value, allowed)
                hint = f"did you mean {near!r}?" if near else ", ".join(allowed)
                raise StrettoError(f"--fix {name}={value} is none of {', '.join(allowed)}", hint=hint)
    if "place" in fixes:
        found["places"] = [place for place in PLACES if place in fixes["place"]]
    for name in ("wire", "weight"):
        if name in fixes:
            found[f"{name}_bytes"] = _BYTES[fixes[name][0]]
    for name in ("optimizer", "program"):
        if name in fixes:
            found[name] = fixes[name][0]
    for name, argument in (("device_gib", "device_bytes"), ("host_gib", "host_bytes")):
        if name in fixes:
            found[argument] = _number(name, fixes[name][0]) * GIB
    if "ranks_per_node" in fixes:
        found["ranks_per_node"] = max(1, int(_number("ranks_per_node", fixes["ranks_per_node"][0])))
    if precision is not None:
        if precision not in ("bf16", "fp16", "tf32", "fp32"):
            raise StrettoError(f"--precision is {precision!r}", hint="one of bf16, fp16, tf32, fp32")
        found["precision"] = precision
    return found


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise StrettoError(f"--fix {name}={text} is no number above 0", hint=f"as in --fix {name}=4")
    return value
