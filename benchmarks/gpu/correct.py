"""Stretto's steps on the device beside those of one process on the CPU in float64.

One rank goes through the device's own communication library. Several ranks share the device over gloo: it
sends from the host, so that messages are kept back as host copies until they are waited for
(`engine/parallel/late.py`), which shows missing waits as well. Compared are the losses
and gradient norms of a few steps; the
updates between them are part of what the later ones show.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from math import isfinite
from typing import Any

import torch
import torch.distributed as dist

from gpu.jobs import GPT, LLAMA, MOE, Trainer, config, legal, tricks_of
from gpu.setting import Setting
from stretto.engine import compiler
from stretto.engine.device import backend_for
from stretto.engine.flex import refusal
from stretto.engine.parallel.late import delay_messages
from stretto.engine.parallel.mesh import Mesh
from stretto.run.launch.local import run_ranks

STEPS = 4
RANKS_S = 60  # for which a rank waits for another
SIZES = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 256}
T5 = {"family": "t5", **SIZES, "encoder_layers": 2, "head_dim": 16, "ffn": 96}
GEMMA = {"family": "gemma2", **SIZES, "kv_heads": 2, "ffn": 128, "attention": {"window": 9}}
LATENT = {
    "family": "deepseek_v3",
    **SIZES,
    "head_dim": 24,
    "ffn": 64,
    "attention": {"latent": {"kv_rank": 16, "rope_dim": 8, "value_dim": 16, "q_rank": 24}},
    "moe": {"experts": 4, "groups": 2, "top_groups": 1, "top_k": 2, "ffn": 32, "shared_ffn": 32},
}
SINKS = {
    "family": "gpt_oss",
    **SIZES,
    "kv_heads": 2,
    "head_dim": 16,
    "ffn": 32,
    "attention": {"window": 9},
    "moe": {"experts": 4, "top_k": 2, "ffn": 32},
}
Words = tuple[str, ...]


@dataclass(frozen=True)
class Case:
    """A job on the device."""

    name: str
    section: dict[str, Any]
    words: Words = ()
    dtypes: Words = ("float64", "float32", "bfloat16")

    @property
    def split(self) -> bool:
        """Whether it needs several ranks."""
        return any(word.startswith("layout.") for word in self.words)


CASES = (
    Case("gpt", GPT),
    Case("llama", LLAMA),
    Case("dropout", {**GPT, "dropout": 0.1}),
    Case("gemma2: windows, soft caps, norms on both sides", GEMMA),
    Case("gpt-oss: sinks, windows, experts", SINKS),
    Case("deepseek: latent attention, groups of experts", LATENT),
    Case("experts", MOE),
    Case("experts with a capacity", {**MOE, "moe": {"experts": 4, "top_k": 2, "capacity": 1.1}}),
    Case("encoder and decoder", T5),
    Case("explicit attention", LLAMA, ("train.attention=explicit",)),
    Case("recompute full", LLAMA, ("recompute.mode=full",)),
    Case("recompute selective", GPT, ("recompute.mode=selective",)),
    Case("muon", LLAMA, ("optim.name=muon",)),
    Case("adafactor", LLAMA, ("optim.name=adafactor",)),
    Case("lamb", LLAMA, ("optim.name=lamb",)),
    Case("states on the host", LLAMA, ("dp.offload=cpu",)),
    Case("states on the host, updates beside the backward", LLAMA, ("dp.offload=cpu", "optim.clip=null")),
    Case("split backward", GPT, ("schedule.name=zb-h1",)),
    Case("ddp", GPT, ("layout.dp=2",)),
    Case("zero2", LLAMA, ("layout.dp=2", "dp.mode=zero2")),
    Case("zero3", LLAMA, ("layout.dp=2", "dp.mode=zero3")),
    Case("tensor and sequence", LLAMA, ("layout.tp=2", "layout.sequence_parallel=true")),
    Case("ring", LLAMA, ("layout.cp=2",)),
    Case("ulysses", LLAMA, ("layout.cp=2", "layout.context=ulysses")),
    Case("experts apart", MOE, ("layout.dp=2", "layout.ep=2")),
    Case("1f1b", GPT, ("layout.pp=2",)),
    Case("zero bubble", LLAMA, ("layout.pp=2", "schedule.name=zb-h1")),
    Case("pipeline and zero1", LLAMA, ("layout.pp=2", "layout.dp=2", "dp.mode=zero1")),
)
# how far losses and norms may be from float64, by type: a few times what rounding does on a CPU
DTYPES = Case.dtypes
EIGHT = "fp8"
TOLERANCES = {"float64": (1e-9, 1e-8), "float32": (1e-6, 1e-5), "bfloat16": (1e-3, 1e-2), EIGHT: (4e-3, 2e-2)}
EIGHT_BITS = (
    Case("fp8 row", LLAMA, ("precision.fp8=row",), ("bfloat16",)),
    Case("fp8 tensor", LLAMA, ("precision.fp8=tensor",), ("bfloat16",)),
)


def of_tricks(setting: Setting) -> list[Case]:
    """Those that change how a step is computed and not its precision, as far as this version and the
    device have them.
    """
    small = {"null": "24"}  # of `train.loss_chunk`, which by itself leaves so few tokens whole
    chosen = [t for t in tricks_of(setting, LLAMA) if t.field.startswith("train.")]
    chosen = [t for t in chosen if t.field != "train.attention"]  # `by_flex` has its own models
    words = [f"{t.field}={small.get(t.value, t.value)}" for t in chosen]
    return [Case(word, LLAMA, (word,)) for word in words]


def by_flex(setting: Setting) -> list[Case]:
    """FlexAttention alone, where it trains."""
    if refusal(setting.device, torch.float32, group=1, d=16, dv=16) is not None:
        return []
    word = "train.attention=flex"
    return [Case(f"{word}, {one['family']}", one, (word,), DTYPES[1:]) for one in (LLAMA, GEMMA)]


def rank_steps(setting: Setting, section: dict[str, Any], words: Sequence[str], late: bool) -> dict[str, Any]:
    """A few steps of the job as one rank; within a process group where there is one."""
    # values large enough for attention to matter, and updates too small to double a rounding error
    made = config(
        section, 32, 2, 4, setting, "optim.lr=1e-3", "model.init_std=0.1", "train.vocab_multiple=4", *words
    )
    job = legal(made)
    one = Trainer(job, Mesh(job.layout, setting.device))
    try:
        with delay_messages(seed=1) if late else nullcontext() as seen:
            for _ in range(STEPS):
                one.step()
            one.replica.states.ready()
    finally:
        one.close()
    return {"losses": one.losses, "norms": one.norms, "broken": [] if seen is None else seen.broken}


Runs = Sequence[tuple[dict[str, Any], Words]]  # sections of `model`, and overrides


def on_rank(setting: Setting, runs: Runs, backend: str) -> list[dict[str, Any]]:
    """`rank_steps` of each job as the rank that RANK names, all of them on the one device."""
    torch.set_num_threads(1)
    if setting.on_gpu:
        torch.cuda.set_device(setting.device)
    compiler.BACKEND = setting.compiler
    dist.init_process_group(backend, timeout=timedelta(seconds=RANKS_S))
    try:
        with setting.choices():
            return [rank_steps(setting, section, words, late=True) for section, words in runs]
    finally:
        dist.destroy_process_group()


def world_of(words: Sequence[str]) -> int:
    """Ranks of a layout."""
    sizes = (word.partition("=") for word in words)
    world = 1
    for name, _, size in sizes:
        if name in ("layout.tp", "layout.cp", "layout.dp", "layout.pp"):
            world *= int(size)
    return world


def error_of(value: float, expected: float) -> float:
    """Relative; infinite where it is not finite."""
    return abs(value - expected) / max(abs(expected), 1e-12) if isfinite(value) else float("inf")


def worst(values: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative error of a series."""
    if len(values) != len(expected) or not values:
        return float("inf")
    return max(map(error_of, values, expected))


class References:
    """What one process computes on the CPU in float64, once for each model and its options."""

    def __init__(self, setting: Setting) -> None:
        self.setting = Setting(torch.device("cpu"), setting.tiny, setting.folder, setting.step)
        self._known: dict[str, dict[str, Any]] = {}

    def of(self, case: Case) -> dict[str, Any]:
        """Of the same job without a layout and what says where things lie."""
        kept = [w for w in case.words if w.startswith("optim.")]
        words = ("train.dtype=float64", *kept)
        key = repr((case.section, words))
        if key not in self._known:
            self._known[key] = rank_steps(self.setting, case.section, words, late=False)
        return self._known[key]


def check(
    setting: Setting, case: Case, dtype: str, references: References, computed: dict[str, Any] | None = None
) -> dict[str, Any]:
    """One case in one type.

    Args:
        computed: `rank_steps` of its first rank; None to take them now.
    """
    words = (f"train.dtype={dtype}", *case.words)
    world = world_of(words)
    try:
        if computed is not None:
            made = computed
        elif world == 1:
            made = rank_steps(setting, case.section, words, late=False)
        else:
            # all tensors are this device's, and gloo gets host copies of them
            made = run_ranks(world, on_rank, setting, [(case.section, words)], "gloo")[0][0]
        # a simulated GPU computes nothing: then it is right to end, with finite values
        expected = made if setting.simulated else references.of(case)
    except Exception:
        return {"case": case.name, "dtype": dtype, "right": False, "error": traceback.format_exc()[-3000:]}
    loss, norm = worst(made["losses"], expected["losses"]), worst(made["norms"], expected["norms"])
    allowed = TOLERANCES[EIGHT if case in EIGHT_BITS else dtype]
    right = loss <= allowed[0] and norm <= allowed[1] and not made["broken"]
    return {
        "case": case.name,
        "dtype": dtype,
        "ranks": world,
        "loss_error": loss,
        "norm_error": norm,
        "broken": made["broken"],
        "right": right,
    }


def check_all(
    setting: Setting,
    chosen: Sequence[Case],
    dtypes: Sequence[str],
    computed: Mapping[tuple[str, str], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Every case in every type, and how many are right.

    Args:
        computed: `rank_steps` of those that were taken before, by case and type.
    """
    references, rows = References(setting), list[dict[str, Any]]()
    for dtype in dtypes:
        for case in chosen:
            if dtype in case.dtypes:
                rows.append(check(setting, case, dtype, references, (computed or {}).get((case.name, dtype))))
                setting.keep({"rows": rows})
    return {
        "rows": rows,
        "right": sum(row["right"] for row in rows),
        "of": len(rows),
        "tolerances": TOLERANCES,
    }


def one_rank(setting: Setting) -> dict[str, Any]:
    """All kinds of models and options on one rank, in three types."""
    whole = [case for case in CASES if not case.split]
    return check_all(setting, [*whole, *of_tricks(setting), *by_flex(setting), *EIGHT_BITS], DTYPES)


def own_library(setting: Setting) -> dict[str, Any]:
    """One rank with a process group of the device's own library, which every collective goes through."""
    backend = backend_for(setting.device.type)
    references = References(setting)
    cases = [case for case in CASES if case.name in ("gpt", "llama", "experts")]
    runs = [(case.section, ("train.dtype=float64", *case.words)) for case in cases]
    rows = list[dict[str, Any]]()
    for case, results in zip(cases, run_ranks(1, on_rank, setting, runs, backend)[0], strict=True):
        expected = results if setting.simulated else references.of(case)
        error = worst(results["losses"], expected["losses"])
        rows.append({"case": case.name, "loss_error": error, "right": error <= TOLERANCES["float64"][0]})
    return {"backend": backend, "rows": rows, "right": sum(row["right"] for row in rows), "of": len(rows)}


def several_ranks(setting: Setting) -> dict[str, Any]:
    """Layouts, on ranks that share the device, in float64, and on a GPU in bfloat16 too.

    Ranks take longer to start than to run all cases. If one of these fails, `check` starts ranks for each.
    """
    dtypes = ("float64",) if setting.tiny else ("float64", "bfloat16")
    split = [case for case in CASES if case.split]
    computed, failed = dict[tuple[str, str], dict[str, Any]](), list[dict[str, Any]]()
    for world in sorted({world_of(case.words) for case in split}):
        these = [(case, dtype) for case in split for dtype in dtypes if world_of(case.words) == world]
        runs = [(case.section, (f"train.dtype={dtype}", *case.words)) for case, dtype in these]
        try:
            results = run_ranks(world, on_rank, setting, runs, "gloo")[0]
        except Exception:
            error = traceback.format_exc()[-3000:]
            failed.append({"case": f"all of {world} ranks", "dtype": "-", "right": False, "error": error})
            continue
        computed |= zip([(case.name, dtype) for case, dtype in these], results, strict=True)
    report = check_all(setting, split, dtypes, computed)
    return {**report, "rows": report["rows"] + failed, "of": report["of"] + len(failed)}
