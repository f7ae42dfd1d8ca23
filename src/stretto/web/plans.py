"""Answers about plans: a search as it goes, the config of one of its layouts, and what can be named."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from stretto.errors import StrettoError
from stretto.job.data_parallel import Dtype, Precision
from stretto.job.huggingface import read_config
from stretto.job.presets import PRESETS, preset
from stretto.planner.assumptions import software_profile, software_profiles
from stretto.planner.estimate import usual_dtype
from stretto.planner.machines.catalogue import clusters, find_cluster
from stretto.planner.search.fixed import fixed
from stretto.planner.search.search import search_rounds
from stretto.planner.search.task import SearchTask, job_to_plan
from stretto.planner.what_if import Answer, answer, changes
from stretto.run.config.written import written
from stretto.view.plan_record import drawn_plan, what_if_record

if TYPE_CHECKING:
    from stretto.job.shape import ModelShape
    from stretto.planner.search.ranking import Plan

Question = Mapping[str, Any]
INTEROP = "stretto_interop"  # the package for other frameworks, which may not be installed
FRAMEWORKS = ("megatron", "nemo", "torchtitan", "deepspeed")
_DTYPES: Mapping[str, Dtype] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_LONGEST = 120.0  # seconds of work of a search


def list_choices(question: Question) -> dict[str, Any]:
    """The models, clusters, software and frameworks that a plan can name."""
    return {
        "models": [*PRESETS],
        "clusters": sorted(cluster.name for cluster in clusters()),
        "software": [*software_profiles()],
        "frameworks": FRAMEWORKS if find_spec(INTEROP) else (),
    }


def plan(question: Question) -> Iterator[dict[str, Any]]:
    """Search for layouts; yield the plan after each round, and then with each line of what-if.

    The question has a model (or the text of a `config.json` in `config`), a cluster with its size, a batch
    and what else `stretto plan` takes: sequence, precision, fix, seconds, software, framework, wide, what_if.

    Raises:
        StrettoError: as `stretto plan`.
    """
    name, task = _task(question)
    result: Plan | None = None
    record: dict[str, Any] = {}
    for result in search_rounds(task):
        if result.ranking or result.nearest is not None:
            record = drawn_plan(result, name)
            yield record
    if result is None or not record:
        raise StrettoError(
            f"nothing was found that fits after {task.seconds:g} s of work",
            hint="search longer, or fix a choice, as in tp=8",
        )
    _LATEST.clear()
    _LATEST[_key(question)] = result
    answers = list[Answer]()
    for change in changes(task) if question.get("what_if") else ():
        answers.append(answer(change, result, task))
        yield {**record, "what_if": what_if_record(result, task, answers)}


def plan_config(question: Question) -> dict[str, Any]:
    """The config of one row of a plan: as `stretto train` takes it, or as the plan's framework does.

    The question is that of the plan, with the row's number in `row`, from 1.

    Raises:
        StrettoError: there is no such row, or the model or layout cannot be written.
    """
    key = _key(question)
    if key not in _LATEST:
        *_, result = search_rounds(_task(question)[1])
        _LATEST.clear()
        _LATEST[key] = result
    result, row = _LATEST[key], int(question["row"])
    if not 1 <= row <= len(result.ranking):
        raise StrettoError(f"there is no row {row}", hint=f"the plan has {len(result.ranking)}")
    if name := question.get("framework"):
        planned = import_module(f"{INTEROP}.frameworks.planned")
        return {"text": planned.emitted_row(_framework(name), result, row, None), "name": f"{name}.txt"}
    ranked = result.ranking[row - 1]
    return {"text": written(ranked.estimate.job, None, ranked.layout), "name": "planned.yaml"}


_LATEST = dict[str, "Plan"]()  # the plan of the latest question, whose rows are asked for next


def _key(question: Question) -> str:
    return json.dumps({**question, "ask": "", "row": 0, "what_if": False}, sort_keys=True)


def shape_of(question: Question) -> tuple[str, ModelShape]:
    """The name and the shape of a question's model: of a preset, or of the text of a `config.json`.

    Raises:
        StrettoError: no preset has that name, or the text describes no model.
    """
    text = question.get("config")
    if not text:
        return question["model"], preset(question["model"])
    try:
        values = json.loads(text)
    except ValueError:
        raise StrettoError("the file is not JSON", hint="drop a config.json of Hugging Face") from None
    if not isinstance(values, dict):
        raise StrettoError("the file is not a mapping", hint="drop a config.json of Hugging Face")
    return question.get("config_name") or "config.json", read_config(values).shape


def _task(question: Question) -> tuple[str, SearchTask]:
    """The name of the model, and the search that a question asks for."""
    cluster_name = str(question["cluster"])
    if cluster_name.endswith((".yaml", ".yml")):
        raise StrettoError("a cluster is named here, not read from a file", hint="as in h100:64")
    cluster = find_cluster(cluster_name)
    if cluster.nodes is None:
        raise StrettoError(f"cluster {cluster_name!r} has no size", hint=f"as in {cluster_name}:64")
    name, shape = shape_of(question)
    batch, sequence = int(question["batch"]), int(question.get("sequence") or shape.pretraining_sequence)
    job = job_to_plan(shape=shape, global_batch=batch, sequence=sequence)
    chosen = str(question.get("precision"))
    dtype = _DTYPES.get(chosen) or usual_dtype(cluster.device)
    fixes = [fix for fix in question.get("fix", ()) if fix]
    task = SearchTask(
        job=replace(job, precision=Precision(dtype=dtype)),
        cluster=cluster,
        seconds=min(float(question.get("seconds", 8.0)), _LONGEST),
        allow_offload=bool(question.get("wide")),
        asynchronous=bool(question.get("asynchronous")),
        fixed=fixed(fixes),
    )
    if question.get("framework"):
        planned = import_module(f"{INTEROP}.frameworks.planned")
        task = planned.task_for(_framework(question["framework"]), task, fixes, None)
    if question.get("software"):
        assumptions = replace(task.assumptions, software=software_profile(question["software"]))
        task = replace(task, assumptions=assumptions)
    return name, task


def _framework(name: str) -> Any:
    return import_module(f"{INTEROP}.frameworks.registry").framework(name)
