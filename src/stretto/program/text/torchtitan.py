"""Settings that torchtitan needs in addition to a schedule's CSV: its class and the modules of each stage.

Fields and rules are those of torchtitan 0.3.0: `ParallelismConfig` in torchtitan/config/configs.py, and
torchtitan/distributed/pipeline_parallel.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate

from stretto.errors import StrettoError
from stretto.layout.placement import loop, vee
from stretto.program.program import Program
from stretto.program.text.torch_csv import check_torch

_EMBEDDING = ["tok_embeddings"]
_HEAD = ["norm", "lm_head"]


def schedule_class(program: Program) -> str:
    """Return the value of `pipeline_parallel_schedule` for use with the CSV. It determines which stages a
    rank builds: those of a V for ZBVZeroBubble, otherwise every p-th.

    Raises:
        StrettoError: torch cannot run the program, or torchtitan cannot place its stages.
    """
    check_torch(program)
    chunks = program.depth // program.ranks
    if program.placement == loop(program.ranks, chunks):
        return "PipelineScheduleMulti"
    if chunks == 2 and program.placement == vee(program.ranks):
        return "ZBVZeroBubble"
    raise StrettoError(
        f"{program.name} has its stages on ranks {', '.join(map(str, program.placement))}: torchtitan places "
        "them round-robin, or two a rank in a V",
        hint="interleaved or zb-v, or --for torch with stages that you place yourself",
    )


def modules_of_stages(stage_layers: Sequence[int]) -> list[list[str]]:
    """Return the value of `module_fqns_per_model_part`: the names of each stage's modules.

    Args:
        stage_layers: number of layers of each stage, including embedding and head.

    Raises:
        StrettoError: a stage has no layers, or only embedding and head exist.
    """
    total = sum(stage_layers)
    if total < 3 or min(stage_layers) < 1:
        raise StrettoError(
            f"stages of {', '.join(map(str, stage_layers))} layers: each needs one, and embedding, layers "
            "and head make three at least",
            hint="count the embedding and the head as layers",
        )
    chain = [_EMBEDDING, *([f"layers.{layer}"] for layer in range(total - 2)), _HEAD]
    ends = list(accumulate(stage_layers))
    return [
        [name for layer in chain[end - count : end] for name in layer]
        for end, count in zip(ends, stage_layers, strict=True)
    ]


def modules_json(modules: Sequence[Sequence[str]]) -> str:
    """Return the lists as JSON, which is also valid TOML and Python, with a line per stage."""
    return "[\n" + ",\n".join("  " + json.dumps(names) for names in modules) + "\n]\n"
