"""The job that a question describes, in the words of `stretto predict`, and the names that there are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stretto.errors import StrettoError
from stretto.job.huggingface import Reading, parse_config
from stretto.job.optimiser import OPTIMISERS
from stretto.job.presets import PRESETS, preset
from stretto.layout import Layout
from stretto.planner.machines.catalogue import clusters, find_cluster
from stretto.planner.machines.cluster import Cluster
from stretto.planner.runs import RunRecord, read_run
from stretto.program import names
from stretto.program.schedules.user_schedule import is_file

Question = Mapping[str, Any]


def list_names(question: Question) -> dict[str, Any]:
    """Models, clusters, schedules and optimisers by name; of a cluster also its device and node."""
    return {
        "models": [*PRESETS],
        "clusters": [
            {"name": each.name, "device": each.device.name, "node": each.node} for each in clusters()
        ],
        "schedules": [*names()],
        "optimisers": [*OPTIMISERS],
    }


def named_cluster(name: str) -> Cluster:
    """The cluster of the catalogue with this name; a page reads no files of the machine that answers it."""
    if name.partition(":")[0] == "here" or name.endswith((".yaml", ".yml")):
        raise StrettoError(f"cluster {name!r} is not in the catalogue", hint="as in dgx-h100:64")
    return find_cluster(name)


def read_layout(question: Question) -> Layout:
    """The layout of a question: its degrees by axis, `expert_tp` 0 for tp, and the order of the axes."""
    degrees = {axis: question.get(axis, 1) for axis in ("tp", "cp", "ep", "dp", "pp")}
    layout = Layout(**degrees, order=question.get("order") or "tp-cp-ep-dp-pp")
    expert_tp = question.get("expert_tp") or None
    return layout if expert_tp is None else replace(layout, expert_tp=expert_tp)


def model_of(question: Question) -> Reading:
    """The model of a question: `config`, the content of a config.json, or else `model`, a name."""
    if question.get("config"):
        return parse_config(question["config"], question.get("file") or "config.json")
    return Reading(shape=preset(question["model"]), kind="", unknown=())


def read_job(question: Question) -> RunRecord:
    """The run that a question describes.

    Args:
        question: a layout (`read_layout`), a model (`model_of`), `cluster`, and in `fields` further words
            of `stretto predict` as texts.

    Raises:
        StrettoError: the first rule that the job breaks.
    """
    layout = read_layout(question)
    fields = {name: str(cell) for name, cell in question.get("fields", {}).items() if str(cell)}
    if is_file(fields.get("schedule", "")):
        raise StrettoError(
            f"schedule {fields['schedule']!r} is a file", hint="`stretto` on the command line takes it"
        )
    degrees = {axis: str(getattr(layout, axis)) for axis in ("tp", "cp", "ep", "dp", "pp")}
    if layout.ep > 1 or layout.expert_tp is not None:
        degrees["expert_tp"] = str(layout.expert_tp or layout.tp)
    cells = {"order": layout.order, **degrees, **fields}
    run = read_run(cells, named_cluster(question["cluster"]), model_of(question).shape)
    return replace(run, job=replace(run.job, layout=layout, expert_tp=layout.expert_tp))
