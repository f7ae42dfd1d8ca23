"""The page docs/evidence/gpu-campaign.md, made of the campaign's JSON: goals, tables, what has not run."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from gpu.jobs import MODELS
from gpu.speed import PLAIN
from gpu.steps import STEPS

Record = dict[str, Any] | None
Results = Mapping[str, Record]
Lines = list[str]
GIB = 2**30
INTRO = """What has been measured on one GPU, and what has not. The page is made of the campaign's JSON in
`benchmarks/gpu/results` (`python benchmarks/gpu/campaign.py --report > docs/evidence/gpu-campaign.md`), and a
test keeps the two alike. The campaign runs with Stretto's sources or wheel, torch for CUDA and no network:"""
COMMAND = "python benchmarks/gpu/campaign.py --seconds 570    # as many steps as fit; again: the rest"
METHOD = """Every contestant does the same work in the same process, one after the other: forward,
backward, clipping, AdamW, on random tokens in bf16. Its step is run until it is warm, then in
three repeats of 50 (fewer where the table says so); the device is waited for at the end of a
repeat alone, and the median of the repeats counts. Stretto's step is that of `stretto train`,
with reading ahead and the loss read in each step. Plain torch is `benchmarks/gpu/plain.py`: the
same model under autocast, torch.compile over the whole of it, fused AdamW, or, of the two models
where that would not fit, with weights and states in bf16 alone; a test compares the losses of
both. MFU = model FLOPs of a step / (its seconds x the vendor's dense bf16 peak); model FLOPs of a
token are three times those of a forward, 2 for each weight of a product that it meets,
attention's scores counted in full, nothing for recomputation (Narayanan et al. 2021, equation 3)."""
NOT_YET = "has not run yet"


def page(results: Results) -> str:
    """The page, as Markdown."""
    lines = ["# On one GPU", "", wrapped(INTRO), "", "```sh", COMMAND, "```", ""]
    done = {name: record for name, record in results.items() if record is not None and record["result"]}
    if any(record["tiny"] for record in done.values()):
        lines += ["**A rehearsal: the figures mean nothing.**", ""]
    lines += ["## Goals", "", *goals(results), ""]
    for title, names, show in SECTIONS:
        there = {name: done[name] for name in names if name in done}
        lines += [f"## {title}", ""]
        lines += show(there) if there else [f"This {NOT_YET}."]
        lines.append("")
    lines += ["## Steps", "", *ledger(results), ""]
    return "\n".join(lines)


def wrapped(text: str) -> str:
    """A paragraph of at most 100 columns."""
    return "\n".join(
        textwrap.wrap(" ".join(text.split()), 100, break_long_words=False, break_on_hyphens=False)
    )


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> Lines:
    """A Markdown table."""
    return [
        f"| {' | '.join(head)} |",
        "|---" * len(head) + "|",
        *(f"| {' | '.join(str(cell) for cell in row)} |" for row in rows),
    ]


def percent(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{100 * value:.{digits}f}%"


def result(results: Results, name: str) -> dict[str, Any] | None:
    """The result of a step that is done."""
    record = results.get(name)
    return record["result"] if record is not None and record["state"] == "done" else None


# ------------------------------------------------------------------ goals


def goals(results: Results) -> Lines:
    """Every goal, the figure, and whether it is met."""
    rows = list[tuple[str, str, str, str]]()

    def add(
        what: str, goal: str, name: str, value: Callable[[dict[str, Any]], tuple[str, bool | None]]
    ) -> None:
        outcome = result(results, name)
        if outcome is None:
            record = results.get(name)
            rows.append((what, goal, NOT_YET if record is None else record["state"], "-"))
            return
        text, met = value(outcome)
        rows.append((what, goal, text, "-" if met is None else "yes" if met else "no"))

    for name, model in MODELS.items():
        add(f"{name}: MFU", f">= {percent(model.goal, 0)}", name, mfu_goal)
        add(f"{name}: over compiled torch", ">= 1.1", name, ratio_goal)
    add("llama3-8b: fp8 over bf16", ">= 1.35", "llama3-8b-fp8", fp8_goal)
    add("one rank beside float64 on a CPU", "all right", "correct", right_goal)
    add("several ranks on the device", "all right", "ranks", right_goal)
    add("host synchronisations of a step", "<= 1", "waits", waits_goal)
    add("delays between streams", "the same bits", "streams", streams_goal)
    add("fp8: loss after 500 steps, over bf16's", "<= 0.5%", "fp8-loss", loss_goal)
    add("predicted memory", "within 5%", "memory", memory_goal)
    add("predicted step of ten shapes", "within 5%", "shapes", shapes_goal)
    add("DLRM over plain PyTorch", ">= 1.2", "dlrm", lambda outcome: dlrm_goal(outcome, "plain PyTorch", 1.2))
    add("DLRM over TorchRec", ">= 1.0", "dlrm", lambda outcome: dlrm_goal(outcome, "TorchRec", 1.0))
    add("a model whose states exceed the device", "trains", "offload-large", beyond_goal)
    return table(("goal", "", "measured", "met"), rows)


def best(outcome: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Stretto's fastest row of a race."""
    rows = [(n, row) for n, row in outcome["rows"].items() if n.startswith("Stretto") and "median_s" in row]
    return min(rows, key=lambda one: one[1]["median_s"], default=None)


def mfu_goal(outcome: dict[str, Any]) -> tuple[str, bool | None]:
    fastest = best(outcome)
    if fastest is None or fastest[1]["mfu"] is None:
        return "no figure", None
    return percent(fastest[1]["mfu"]), fastest[1]["mfu"] >= outcome["goal_mfu"]


def ratio_goal(outcome: dict[str, Any]) -> tuple[str, bool | None]:
    fastest, plain = best(outcome), outcome["rows"].get(PLAIN, {})
    if fastest is None or "median_s" not in plain:
        return "no figure", None
    ratio = plain["median_s"] / fastest[1]["median_s"]
    return f"{ratio:.2f}", ratio >= 1.1


def fp8_goal(outcome: dict[str, Any]) -> tuple[str, bool | None]:
    rows = outcome["rows"]
    eight = [row["median_s"] for name, row in rows.items() if name.startswith("fp8") and "median_s" in row]
    if not eight or "median_s" not in rows["bf16"]:
        return "no figure", None
    ratio = rows["bf16"]["median_s"] / min(eight)
    return f"{ratio:.2f}", ratio >= 1.35


def right_goal(outcome: dict[str, Any]) -> tuple[str, bool | None]:
    return f"{outcome['right']} of {outcome['of']}", outcome["right"] == outcome["of"]


def waits_goal(outcome: dict[str, Any]) -> tuple[str, bool | None]:
    most = max(row["each_step"] for row in outcome["rows"])
    return f"{most:.1f} at most", most <= outcome["goal"]


def streams_goal(outcome: dict[str, Any]) -> tuple[str, bool | None]:
    return f"{outcome['same']} of {outcome['of']}", outcome["same"] == outcome["of"]


def loss_goal(outcome: dict[str, Any]) -> tuple[str, bool | None]:
    rows = outcome["rows"]
    over = [
        rows[n]["last"] / rows["bf16"]["last"] - 1 for n in ("fp8=row", "fp8=tensor") if "last" in rows[n]
    ]
    return ("no figure", None) if not over else (percent(max(over), 2), max(over) <= outcome["goal"])


def errors(outcome: dict[str, Any]) -> list[float]:
    return [abs(row["error"]) for row in outcome["rows"].values() if isinstance(row.get("error"), float)]


def memory_goal(outcome: dict[str, Any]) -> tuple[str, bool | None]:
    seen = errors(outcome)
    return (
        ("no figure", None) if not seen else (f"{percent(max(seen))} at most", max(seen) <= outcome["goal"])
    )


def shapes_goal(outcome: dict[str, Any]) -> tuple[str, bool | None]:
    rows = [row["errors"] for row in outcome["rows"].values() if "errors" in row]
    seen = [abs(row["profile"]) for row in rows if "profile" in row]
    if not seen:
        return "no figure", None
    return f"{percent(median(seen))} median, {percent(max(seen))} at most", max(seen) <= outcome["goal"]


def dlrm_goal(outcome: dict[str, Any], peer: str, goal: float) -> tuple[str, bool | None]:
    key = f"{peer}, uniform ids"
    ours, theirs = outcome["rows"].get("Stretto, uniform ids", {}), outcome["rows"].get(key, {})
    if "seconds" not in ours or "seconds" not in theirs:
        return "no figure", None
    ratio = median(theirs["seconds"]) / median(ours["seconds"])
    return f"{ratio:.2f}", ratio >= goal


def beyond_goal(outcome: dict[str, Any]) -> tuple[str, bool | None]:
    needed, device = outcome["needed_bytes"], outcome["device_bytes"]
    text = f"{needed / GIB:.0f} GiB needed, {median(outcome['seconds']):.2g} s a step"
    return text, None if device is None else needed > device


# ------------------------------------------------------------------ sections


def machine(there: Mapping[str, dict[str, Any]]) -> Lines:
    facts = there["machine"]["result"]
    memory = facts["memory_bytes"]
    rows = [
        ("device", facts["device"]),
        ("memory", "-" if memory is None else f"{memory / GIB:.1f} GiB"),
        ("CUDA, NCCL", f"{facts['cuda']}, {facts['nccl']}"),
        ("cores, Python", f"{facts['cores']}, {facts['python']}"),
        ("bf16 product of random matrices", f"{facts['product_flops'] / 1e12:.0f} TFLOP/s"),
        (
            "dense bf16 peak, by the vendor",
            "-" if not facts["peak_flops"] else f"{facts['peak_flops'] / 1e12:.0f} TFLOP/s",
        ),
        ("copy, bytes read and written", f"{facts['copy_bytes_per_s'] / 1e12:.2f} TB/s"),
        ("from pinned memory", f"{facts['to_device_bytes_per_s'] / 1e9:.0f} GB/s"),
        ("packages", ", ".join(f"{name} {of}" for name, of in facts["packages"].items() if of)),
    ]
    return table(("", ""), rows)


def correct(there: Mapping[str, dict[str, Any]]) -> Lines:
    rows = list[tuple[object, ...]]()
    wrong = list[tuple[object, ...]]()
    for name, record in there.items():
        for row in record["result"]["rows"]:
            if not row["right"]:
                what = row.get("broken") or last_line(row.get("error", ""))
                seen = [f"{row[k]:.1e}" if k in row else "-" for k in ("loss_error", "norm_error")]
                wrong.append((row["case"], row.get("dtype", "float64"), *seen, what))
        result = record["result"]
        count = f"{sum(row['right'] for row in result['rows'])} of {len(result['rows'])}"
        rows.append((name, count, when(record)))
    lines = table(("step", "right", "when"), rows)
    if wrong:
        lines += ["", *table(("wrong", "type", "loss", "norm", ""), wrong)]
    return lines


def speed(there: Mapping[str, dict[str, Any]]) -> Lines:
    rows = list[tuple[object, ...]]()
    for name, record in there.items():
        outcome = record["result"]
        plain = outcome["rows"].get(PLAIN, {}).get("median_s")
        what = f"{name}, sequence {outcome['sequence']}, {outcome['microbatches']} x {outcome['micro_batch']}"
        for contestant, row in outcome["rows"].items():
            if "median_s" not in row:
                rows.append((what, contestant, last_line(row["error"]), "-", "-", "-", "-", "-"))
                continue
            spread = (max(row["seconds"]) - min(row["seconds"])) / row["median_s"]
            rows.append(
                (
                    what,
                    contestant,
                    f"{1e3 * row['median_s']:.1f}",
                    f"{percent(spread)}, {len(row['seconds'])} x {row['steps']}",
                    f"{row['tokens_per_s']:,.0f}",
                    percent(row["mfu"]),
                    "-" if plain is None else f"{plain / row['median_s']:.2f}",
                    f"{row['allocated_bytes'] / GIB:.1f}",
                )
            )
    head = ("model", "", "ms a step", "spread, steps", "tokens/s", "MFU", "over compiled torch", "GiB")
    return [wrapped(METHOD), "", *table(head, rows)]


def tricks(there: Mapping[str, dict[str, Any]]) -> Lines:
    outcome = there["tricks"]["result"]
    rows = list[tuple[object, ...]]()
    for without, with_it in outcome.get("pairs", []):
        off, on = outcome["rows"][without], outcome["rows"][with_it]
        if "median_s" not in off or "median_s" not in on:
            rows.append((with_it, without, last_line((on if "error" in on else off)["error"]), "-"))
            continue
        saved = (off["allocated_bytes"] - on["allocated_bytes"]) / GIB
        rows.append((with_it, without, f"{off['median_s'] / on['median_s']:.3f}", f"{saved:+.1f}"))
    return table(("with", "without", "times as fast", "GiB saved"), rows)


def attention(there: Mapping[str, dict[str, Any]]) -> Lines:
    outcome = there["attention"]["result"]
    rows = list[tuple[object, ...]]()
    for style, contestants in outcome["rows"].items():
        reference = median(contestants["explicit"]["seconds"])
        for name, row in contestants.items():
            if "seconds" not in row:
                rows.append((style, name, row["error"], "-", "-"))
                continue
            seconds, peak = median(row["seconds"]), row["allocated_bytes"] / GIB
            rows.append((style, name, f"{1000 * seconds:.2f}", f"{reference / seconds:.2f}", f"{peak:.2f}"))
    head = ("style", "kernel", "ms, forward and backward", "over explicit", "GiB at most")
    sizes = f"{outcome['heads']} heads of {outcome['head_dim']}, {outcome['sequence']} positions, bfloat16."
    return [sizes, "", *table(head, rows)]


def memory(there: Mapping[str, dict[str, Any]]) -> Lines:
    rows = list[tuple[object, ...]]()
    for name, row in there["memory"]["result"]["rows"].items():
        if "predicted" not in row:
            rows.append((name, "-", last_line(row["error"]), "-", "-", "-"))
            continue
        sizes = [f"{row[k] / GIB:.2f}" for k in ("predicted", "allocated", "reserved")]
        kept = ", ".join(f"{n} {mode}" for mode, n in row["recomputed"].items())
        rows.append((name, *sizes, f"{100 * row['error']:+.1f}%", kept))
    return table(("job", "predicted, GiB", "allocated", "reserved", "error", "blocks recomputed"), rows)


def prediction(there: Mapping[str, dict[str, Any]]) -> Lines:
    if "shapes" not in there:
        return ["The profile was measured; the shapes have not been run yet."]
    rows = list[tuple[object, ...]]()
    for name, row in there["shapes"]["result"]["rows"].items():
        if "measured" not in row:
            rows.append((name, last_line(row["error"]), "-", "-"))
            continue
        seen = [
            f"{100 * row['errors'][k]:+.1f}%" if k in row["errors"] else "-" for k in ("profile", "catalogue")
        ]
        rows.append((name, f"{1e3 * row['measured']:.1f}", *seen))
    return table(("shape", "ms a step", "error by the measured profile", "by the catalogue"), rows)


def waits(there: Mapping[str, dict[str, Any]]) -> Lines:
    lines = list[str]()
    if "waits" in there:
        rows = [
            (
                row["job"],
                f"{row['each_step']:.2f}",
                ", ".join(short(line) for line in list(row["lines"])[:5]) or "-",
            )
            for row in there["waits"]["result"]["rows"]
        ]
        note = """Synchronisations that torch's debug mode sees; it does not see copies from memory that
        is not pinned, nor what happens inside torch.distributed."""
        lines += [wrapped(note), "", *table(("job", "a step", "at"), rows), ""]
    if "streams" in there:
        rows = [
            (
                row["job"],
                row["delays"],
                *(yes(row[k]) for k in ("reproducible", "same_bits")),
                f"{row['farthest']:.1e}",
            )
            for row in there["streams"]["result"]["rows"]
        ]
        head = ("job", "delays", "same bits twice without", "with", "farthest")
        note = "Kernels that pass time, queued at random wherever a stream begins work or marks an event."
        lines += [note, "", *table(head, rows)]
    if "host" in there:
        outcome = there["host"]["result"]["rows"].items()
        rows = [(name, f"{1e3 * median(row['seconds']):.2f}") for name, row in outcome]
        lines += ["", *table(("one short sample of the 1B: the host's time", "ms a step"), rows)]
    return lines


def yes(right: bool) -> str:
    return "yes" if right else "no"


def short(line: str) -> str:
    """A place in a file without what is before the package."""
    return f"`{line.rpartition('/stretto/')[2]}`"


def overlap(there: Mapping[str, dict[str, Any]]) -> Lines:
    rows = list[tuple[object, ...]]()
    longest = list[str]()
    for name, row in there["overlap"]["result"]["rows"].items():
        if "seconds" not in row:
            rows.append((name, last_line(row["error"]), "-", "-", "-"))
            continue
        beside = row["copying_beside_kernels"] / row["copying"] if row["copying"] else None
        shares = [percent(row[k] / row["seconds"] if row["seconds"] else None) for k in ("idle", "copying")]
        rows.append((name, f"{1e3 * row['seconds']:.1f}", row["kernels"], *shares, percent(beside)))
        longest += [f"- {name}: {top(row)}"] if row["longest"] else []
    head = ("step of", "ms on the device", "kernels", "idle", "copying", "of that beside kernels")
    kernels = [line for one in longest for line in (wrapped(one), "")]
    return [*table(head, rows), "", *kernels][:-1]


def top(row: dict[str, Any]) -> str:
    """The kernels that take most of a step's time."""
    some = list(row["longest"].items())[:5]
    return "; ".join(f"`{name[:60]}` {percent(seconds / row['seconds'])}" for name, seconds in some)


def fp8(there: Mapping[str, dict[str, Any]]) -> Lines:
    outcome = there["fp8-loss"]["result"]
    base = outcome["rows"]["bf16"].get("last")
    rows = list[tuple[object, ...]]()
    for name, row in outcome["rows"].items():
        if "last" not in row:
            rows.append((name, last_line(row["error"]), "-", "-"))
            continue
        over = "-" if base is None else f"{100 * (row['last'] / base - 1):+.2f}%"
        rows.append((name, f"{row['last']:.4f}", over, f"{row['seconds']:.0f}"))
    text = f"Mean loss of the last 50 of {outcome.get('steps', 500)} steps on the sample text."
    return [text, "", *table(("", "loss", "over bf16", "s"), rows)]


def dlrm(there: Mapping[str, dict[str, Any]]) -> Lines:
    outcome = there["dlrm"]["result"]
    rows = list[tuple[object, ...]]()
    for name, row in outcome["rows"].items():
        if "seconds" not in row:
            rows.append((name, last_line(row["error"]), "-", "-"))
            continue
        seconds = median(row["seconds"])
        speed = f"{outcome['samples'] / seconds:,.0f}" if "samples" in outcome else "-"
        rows.append((name, f"{1e3 * seconds:.2f}", speed, f"{row['allocated_bytes'] / GIB:.1f}"))
    return table(("", "ms a step", "samples/s", "GiB"), rows)


def offload(there: Mapping[str, dict[str, Any]]) -> Lines:
    rows = list[tuple[object, ...]]()
    outcome = {name: dict(record["result"]) for name, record in there.items()}
    races = outcome.get("offload-cost", {"rows": {}})["rows"]
    if "offload-large" in outcome:
        races = {**races, "states beyond the device": outcome["offload-large"]}
    for name, row in races.items():
        if "seconds" not in row:
            rows.append((name, "-", "-", last_line(row["error"]), "-"))
            continue
        seconds = median(row["seconds"])
        sizes = f"{row['parameters'] / 1e9:.2f} B", f"{row['allocated_bytes'] / GIB:.1f}"
        rows.append((name, *sizes, f"{seconds:.2f}", f"{row['tokens'] / seconds:,.0f}"))
    return table(("", "parameters", "GiB on the device", "s a step", "tokens/s"), rows)


def suite(there: Mapping[str, dict[str, Any]]) -> Lines:
    rows = [(f"`{name}`", row["summary"]) for name, row in there["suite"]["result"]["rows"].items()]
    return table(("tests", ""), rows)


def last_line(text: str) -> str:
    """Of a traceback, without the hint of what would mend it; fit for a table's cell."""
    lines = [line for line in text.strip().splitlines() if line.strip() and not line.startswith("hint:")]
    return lines[-1].replace("|", "/")[:120] if lines else "-"


def when(record: dict[str, Any]) -> str:
    return f"{record['time'][:10]}, {record['commit']}"


def ledger(results: Results) -> Lines:
    """What ran when, on what, at which commit; what failed; what has not run."""
    rows = list[tuple[object, ...]]()
    for step in STEPS:
        record = results.get(step.name)
        if record is None:
            rows.append((f"`{step.name}`", step.title, NOT_YET, "-", "-"))
            continue
        state = record["state"]
        text = state if state == "done" else f"{state}: {last_line(record['error'])}"
        machine = f"{record['device']}, torch {record['torch']}"
        rows.append(
            (f"`{step.name}`", step.title, text, f"{record['seconds']:.0f}", f"{machine}, {when(record)}")
        )
    return table(("step", "", "state", "s", "machine, date, commit"), rows)


SECTIONS: tuple[tuple[str, tuple[str, ...], Callable[[Mapping[str, dict[str, Any]]], Lines]], ...] = (
    ("Machine", ("machine",), machine),
    ("Correctness", ("correct", "library", "ranks"), correct),
    ("Speed", (*MODELS, "llama3-8b-fp8"), speed),
    ("Tricks", ("tricks",), tricks),
    ("Attention", ("attention",), attention),
    ("Memory", ("memory",), memory),
    ("Predicted step times", ("calibration", "shapes"), prediction),
    ("What is waited for", ("waits", "streams", "host"), waits),
    ("Overlap", ("overlap",), overlap),
    ("Loss in 8 bits", ("fp8-loss",), fp8),
    ("Recommender", ("dlrm",), dlrm),
    ("Offload", ("offload-cost", "offload-large"), offload),
    ("Tests", ("suite",), suite),
)
