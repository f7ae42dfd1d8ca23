"""Programs as files: CSV, JSON, a picture, Megatron-LM's layout, and a config that trains one."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from stretto.errors import StrettoError
from stretto.layout.cut import cut
from stretto.program import ActionKind, Program, check
from stretto.program.text import exact_csv, to_json
from stretto.program.text.megatron import megatron_layout
from stretto.view.panel_svg import compare_svg, timeline_svg
from stretto.web.schedules import Question, program_of, replay_program, titled

_MEGATRON = ("1f1b", "interleaved")
_OPTIONS = ("chunks", "group", "waves", "vertical_sync")  # of a schedule, as in a config


def program_file(question: Question) -> dict[str, Any]:
    """Return the files of a format: csv, json, svg, megatron or config, each with a name, its type and text.

    Raises:
        StrettoError: the format does not hold the program, or the program does not run.
    """
    described: Sequence[Question] = question["programs"]
    cost_fields = question.get("costs", {})
    kind = question["format"]
    if kind == "svg":
        timelines = [titled(replay_program(each, cost_fields)[0], each) for each in described]
        picture = compare_svg(timelines) if len(timelines) > 1 else timeline_svg(timelines[0])
        name = "-".join(timeline.program.name for timeline in timelines)
        return {"files": [_file(name, "svg", "image/svg+xml", picture)]}
    description = described[0]
    program = program_of(description, cost_fields)
    check(program)
    name = program.name + "-edited" * bool(description.get("orders"))
    if kind == "csv":
        return {"files": [_file(name, "csv", "text/csv", exact_csv(program))]}
    if kind == "json":
        return {"files": [_file(name, "json", "application/json", to_json(program))]}
    if kind == "megatron":
        text = _megatron(program, description, question["layers"])
        return {"files": [_file(name, "txt", "text/plain", text)]}
    return {"files": _config(program, name, description, question["layers"])}


def _file(name: str, ending: str, kind: str, text: str) -> dict[str, str]:
    stem = re.sub(r"[^\w.=-]+", "-", name).strip("-.") or "program"
    return {"name": f"{stem}.{ending}", "type": kind, "text": text}


def _stages(program: Program, layers: int) -> list[range]:
    """Cut a chain of embedding, layers and head evenly into the program's stages."""
    if layers + 2 < program.depth:
        raise StrettoError(
            f"{layers} layers: with embedding and head too few for {program.depth} stages",
            hint=f"nearest is {program.depth - 2} layers",
        )
    return cut([1.0] * (layers + 2), program.depth)


def _megatron(program: Program, description: Question, layers: int) -> str:
    """Return the options of Megatron-LM that cut a model into the program's stages."""
    edited = bool(description.get("orders") or description.get("text"))
    if edited or program.name not in _MEGATRON:
        raise StrettoError(
            f"Megatron-LM makes its schedule itself, 1F1B or interleaved 1F1B, and takes no program: "
            f"{'an edited ' * edited}{program.name} is neither",
            hint="torch and torchtitan run its CSV, and Stretto all of them",
        )
    return (
        f"--pipeline-model-parallel-size {program.ranks} --num-layers {layers} "
        f"--pipeline-model-parallel-layout '{megatron_layout(_stages(program, layers), layers)}'\n"
    )


def _config(program: Program, name: str, description: Question, layers: int) -> list[dict[str, str]]:
    """Return a config that trains a small model by the program, and the program's file if it needs one."""
    if not program.trains:
        raise StrettoError(f"{program.name} has forwards only, and trains nothing")
    _stages(program, layers)
    files = list[dict[str, str]]()
    if description.get("orders") or description.get("text") or description["name"] == "auto":
        if program.steps > 1:
            raise StrettoError(
                f"the program is a window of {program.steps} steps, but training decides when to drain",
                hint="an order of your own is of one step: steps=1",
            )
        # recomputation is the config's: training adds it again
        orders = [[a for a in order if a.kind is not ActionKind.RECOMPUTE] for order in program.orders]
        program = replace(program, orders=tuple(map(tuple, orders)))
        try:
            files.append(_file(name, "csv", "text/csv", exact_csv(program)))
        except StrettoError:
            files.append(_file(name, "json", "application/json", to_json(program)))
        chosen = {"file": files[0]["name"]}
    else:
        options = {key: value for key, value in description.get("options", {}).items() if key in _OPTIONS}
        chosen = {"name": program.name, **options}
    lines = "".join(f"  {key}: {json.dumps(value)}\n" for key, value in chosen.items())
    text = _CONFIG.format(
        name=name,
        ranks=program.ranks,
        layers=layers,
        schedule=lines,
        microbatches=program.step_microbatches,
        # stages that update one by one share no weights and no norm
        tied="  tied: false\n" * bool(program.versions),
        clip="  clip: null\n" * bool(program.versions),
        recompute="recompute:\n  mode: full\n\n" * bool(description.get("recompute")),
        file=f"{_file(name, 'yaml', '', '')['name']}",
    )
    return [_file(name, "yaml", "application/yaml", text), *files]


_CONFIG = """\
# A small GPT on Stretto's own text, trained by {name} on {ranks} ranks: put your model and data in its place.
#   stretto train {file}      (in the folder of this file)

model:
  family: gpt
  layers: {layers}
  hidden: 128
  heads: 4
  dropout: 0.0
{tied}
data:
  source: stretto-sample
  sequence: 128

layout:
  pp: {ranks}

schedule:
{schedule}
{recompute}batch:
  global_size: {microbatches}    # microbatches of the schedule x batch.micro_size x layout.dp
  micro_size: 1

optim:
  lr: 1e-3
{clip}
train:
  steps: 20
  device: cpu
  dtype: float32

checkpoint:
  every: 20
"""
