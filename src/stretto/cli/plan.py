"""`stretto plan`: the best layouts of a model on a cluster."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli import interop
from stretto.cli.interop import Emit, Output
from stretto.cli.options import Json
from stretto.cli.output import (
    check_writable,
    command_app,
    command_line,
    fitting_table,
    labelled,
    report,
    say_no,
    tflops_text,
    train_command,
    watching,
    write_text,
)
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from stretto.cli.plan_tables import PlanOptions
    from stretto.planner.memory.fits import Fit
    from stretto.planner.search.ranking import Plan, Ranked
    from stretto.planner.search.task import Task
    from stretto.run.config.schema import TrainConfig
    from stretto.spec.data_parallel import Dtype
    from stretto.spec.job import Job


app = command_app()


@app.command(
    epilog="Example: stretto plan --model gpt3-175b --cluster dgx-a100-80gb:1024 --batch 1536 --fix tp=8 "
    "--write plan.yaml"
)
def plan(
    context: typer.Context,
    config: Annotated[
        str | None,
        typer.Argument(metavar="[CONFIG]", help="Take model, batch and sequence from this YAML file."),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[a.b=c ...]", help="Fields of CONFIG to override.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="A preset's name, or a Hugging Face config.json.")] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="A cluster or device of the catalogue and how many devices, as in h100:64; a YAML file; "
            "or here: this machine, as `stretto calibrate` measured it."
        ),
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Samples per step.")] = None,
    sequence: Annotated[
        int | None, typer.Option(min=1, help="Tokens per sample; default: the model's.")
    ] = None,
    target_sequence: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a decoder's sample beside an encoder; default: as many."),
    ] = None,
    max_gpus: Annotated[
        int | None, typer.Option(min=1, help="Use at most this many devices; its divisors are tried too.")
    ] = None,
    fix: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Fix a choice, as in tp=8 or pp=4,8; repeatable."),
    ] = None,
    objective: Annotated[str, typer.Option(help="time or tokens_per_dollar.")] = "time",
    precision: Annotated[
        str | None, typer.Option(help="bf16, fp16 or fp32; default: bf16, fp16 on devices without it.")
    ] = None,
    asynchronous: Annotated[
        bool,
        typer.Option(
            "--asynchronous",
            help="Also try asynchronous schedules, which update within the step and train differently; "
            "without a CONFIG they drain every 100 steps.",
        ),
    ] = False,
    wide: Annotated[
        bool,
        typer.Option(
            "--wide", help="Try offload, and ZeRO 2 and 3 in pipelines, even if layouts fit without them."
        ),
    ] = False,
    seconds: Annotated[
        float,
        typer.Option(
            min=0.1,
            help="Time limit of the search on the clock; a search that is cut short says so, and by how much "
            "something faster could have been missed.",
        ),
    ] = 8.0,
    top: Annotated[int, typer.Option(min=1, help="Layouts to show.")] = 10,
    room: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="GIB",
            help="Device memory that the fastest safe layout, shown beside the fastest, leaves free beyond "
            "the interval of its prediction.",
        ),
    ] = 0.0,
    write: Annotated[Path | None, typer.Option(help="Write the best layout's config here.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with pictures here.")] = None,
    emit: Emit = None,
    row: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="With --emit: the N-th layout; default: the first."),
    ] = None,
    output: Output = None,
    placement: Annotated[
        Path | None,
        typer.Option(
            help="For a recommender: evaluate the placements in this YAML file instead of searching."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Search all legal layouts, predict their time and memory, and rank the best.

    For a recommender (--model dlrm-113b, or its CONFIG), places the tables and predicts samples per second.
    --fix then takes split=row,data, place=device, optimizer=adagrad and others; --placement evaluates a file
    that --write wrote.

    Beside the fastest layouts it shows the fastest safe one and what people run without a search: FSDP, and
    tensor parallelism in a node x a pipeline.

    With --emit only layouts that the framework has are searched, at the costs that they have there; for a
    recommender --emit torchrec writes TorchRec's sharding plan.

    Exit code 1 if nothing fits; 3 if the search was cut short before it found or excluded anything.
    """
    flags = {"asynchronous": asynchronous, "wide": wide}
    lengths = {"sequence": sequence, "target-sequence": target_sequence}
    of_others = {**lengths, "max-gpus": max_gpus, "html": html, "row": row, **flags}
    target = interop.framework_named(emit, {"row": row, "output": output})
    from stretto.cli.plan_tables import PlanOptions

    options = PlanOptions(
        model=model,
        cluster=cluster,
        batch=batch,
        fix=fix or [],
        precision=precision,
        placement=placement,
        write=write,
        emit=emit,
        output=output,
    )
    if _recommender(config, overrides or [], options, of_others, as_json):
        return
    interop.check_trains_language(emit)
    from stretto.planner.search.search import search

    base = _base(config, overrides)
    search_options = {
        "objective": objective,
        "top": top,
        "seconds": seconds,
        "memory_headroom": room * GIB,
        "asynchronous": asynchronous,
        "allow_offload": wide,
    }
    task = _task(
        base=base,
        model=model,
        cluster=cluster,
        batch=batch,
        lengths=(sequence, target_sequence),
        max_gpus=max_gpus,
        fix=fix or [],
        precision=precision,
        search_options=search_options,
    )
    if target is not None:
        task = interop.emit.task_for(target, task, fix or [], base)
    if write is not None:
        _check_writable(task.job, base)
    check_writable(html)
    with watching() as progress:
        result = search(task, progress)
    name = model or _model_name(base, config)
    if html is not None:
        from stretto.view.plan_page import plan_page

        built = not task.job.shape.unsupported_parts
        commands = _next_commands(context, write, cluster, base) if built else {}
        write_text(html, plan_page(result, name, commands))
    if write is not None and result.ranking:
        _write(write, result, base)
    required = _required(base)
    emitted = (
        interop.emit.emitted_row(target, result, row, base) if target is not None and result.ranking else None
    )
    record = {**facts(result, write), "required": required, "emitted": emitted} if as_json else {}
    if emitted is not None and (output is not None or not as_json):
        interop.print_emitted(emitted, output)

    def text(to: Console) -> None:
        if emitted is None or output is not None:
            if sequence is None and base is None:
                tokens = f"{task.sequence:,} tokens, as {name} was pretrained"
                to.print(f"note: no --sequence: planned for samples of {tokens}", soft_wrap=True)
            show(to, result, task, name)
        if write is not None and result.ranking:
            to.print(f"wrote {write}: {train_command(write, required)}", soft_wrap=True)
        if output is not None and emitted is not None:
            to.print(f"wrote {output}", soft_wrap=True)

    report(record, as_json, text)
    if not result.ranking:
        raise say_no() if result.complete else typer.Exit(_CUT_SHORT)


def _recommender(
    config: str | None, overrides: list[str], options: PlanOptions, others: dict[str, Any], as_json: bool
) -> bool:
    """Plan a recommender where `--model` or the config names one; returns whether it did."""
    from stretto.cli.plan_tables import plan_tables
    from stretto.recommender.config.load import load_config
    from stretto.recommender.shape import is_dlrm
    from stretto.run.config.schema import TrainConfig

    named = options.model is not None and is_dlrm(options.model)
    job = load_config(config, overrides) if config is not None and (named or options.model is None) else None
    if named or not (job is None or isinstance(job, TrainConfig)):
        if isinstance(job, TrainConfig):
            raise StrettoError(
                f"{config} is not the config of a recommender",
                hint=f"leave it out, or --model {options.model}",
            )
        plan_tables(None if config is None else Path(config).stem, job, options, others, as_json)
        return True
    if options.placement is not None:
        raise StrettoError("--placement is for recommenders", hint="as in --model dlrm-113b")
    return False


def _base(config: str | None, overrides: list[str] | None) -> TrainConfig | None:
    if config is None:
        return None
    from stretto.cli.jobs import load_language

    return load_language(config, overrides or [])


def _model_name(base: TrainConfig | None, config: str | None) -> str:
    """The config's preset, or its family and where it is described."""
    assert base is not None
    return base.model.preset or f"{base.model.family} of {config}"


def _task(
    base: TrainConfig | None,
    model: str | None,
    cluster: str | None,
    batch: int | None,
    lengths: tuple[int | None, int | None],
    max_gpus: int | None,
    fix: list[str],
    precision: str | None,
    search_options: dict[str, Any],
) -> Task:
    from stretto.planner.estimate import usual_dtype
    from stretto.planner.machines.catalogue import find_cluster
    from stretto.planner.search.fixed import fixed
    from stretto.planner.search.task import Task, job_to_plan
    from stretto.spec.data_parallel import Precision
    from stretto.spec.presets import find_shape

    sequence, target_sequence = lengths
    if search_options["objective"] not in ("time", "tokens_per_dollar"):
        raise StrettoError(
            f"--objective is {search_options['objective']!r}",
            hint="time, or tokens_per_dollar for the cheapest",
        )
    if cluster is None:
        raise StrettoError("--cluster is missing", hint="as in --cluster dgx-a100-80gb:64")
    sized = find_cluster(cluster, max_gpus)
    if sized.nodes is None:
        raise StrettoError(f"--cluster {cluster!r} has no size", hint=f"as in {cluster}:64")
    search_options |= {"fixed": fixed(fix), "smaller": max_gpus is not None}
    if base is not None:
        from stretto.run.config.job import job_of

        known = job_of(base)
        shape = find_shape(model) if model else known.shape
        batch, sequence = batch or known.global_batch, sequence or known.sequence
        target_sequence = target_sequence or known.target_sequence
    elif model is None or batch is None:
        missing = "--model" if model is None else "--batch"
        raise StrettoError(f"{missing} is missing", hint="as in --model llama3-8b --batch 512, or a CONFIG")
    else:
        known, shape = None, find_shape(model)
    if target_sequence is not None and base is None and not shape.encoder_layers:
        raise StrettoError(
            f"--target-sequence is {target_sequence}, and the model has no encoder",
            hint="leave it out, or name a model such as t5-3b",
        )
    job = job_to_plan(
        shape=shape,
        global_batch=batch,
        sequence=sequence or shape.pretraining_sequence,
        target_sequence=target_sequence or 0,
    )
    if known is not None:
        names = ["precision", "optimiser", "attention", "loss_chunk", "vocab_multiple", "bucket"]
        names += ["unified_memory", "steps_between_drains", "async_save"]
        job = replace(job, **{name: getattr(known, name) for name in names})
    else:
        job = replace(job, precision=Precision(dtype=usual_dtype(sized.device)))
    if precision is not None:
        job = replace(job, precision=replace(job.precision, dtype=_dtype(precision)))
    return Task(job=job, cluster=sized, **search_options)


def _dtype(name: str) -> Dtype:
    known: dict[str, Dtype] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    if name not in known:
        raise StrettoError(f"--precision is {name!r}", hint=f"one of {', '.join(known)}")
    return known[name]


def _check_writable(job: Job, base: TrainConfig | None) -> None:
    """Raise StrettoError, before a long search, for a model that no config can describe to training."""
    from stretto.run.config.written import model_section

    try:
        if base is None or base.shape() != job.shape:
            model_section(job.shape)
    except StrettoError as error:
        raise StrettoError(f"--write: {error.message}", hint=f"leave --write out, or {error.hint}") from None


def _required(base: TrainConfig | None) -> list[str]:
    from stretto.run.config.written import required_fields

    return list(required_fields(base))


def _next_commands(
    context: typer.Context, write: Path | None, cluster: str | None, base: TrainConfig | None
) -> dict[str, str]:
    """The commands to go on with, by what each does."""
    config = write or Path("planned.yaml")
    again = command_line(context, without=("write", "html", "as_json"))
    return {
        "write the first as a config": f"{again} --write {config}",
        "predict it, and variants": f"stretto predict {config} --cluster {cluster}",
        "its memory, tensor by tensor": f"stretto memory {config}",
        "train it": train_command(config, _required(base)),
    }


def _write(path: Path, result: Plan, base: TrainConfig | None) -> None:
    from stretto.run.config.written import written

    first = result.ranking[0]
    made = first.estimate
    about = (
        f"{first.layout}\n"
        f"predicted on {made.job.layout.world} x {made.cluster.device.name}: {made.seconds:.4g} s a step "
        f"({made.low:.4g} to {made.high:.4g}), {made.tflops_per_gpu:.4g} TFLOP/s a device"
    )
    write_text(path, written(made.job, base, about))


GIB = 2**30
_CUT_SHORT = 3  # exit code: nothing was found, and it is not known that nothing fits
_BAR = 12  # characters of a full device


# ------------------------------------------------------------------ JSON


def facts(plan: Plan, written: Path | None) -> dict[str, Any]:
    """The plan as the command's JSON."""
    return {
        "candidates": plan.candidates,
        "replayed": plan.replayed,
        "feasible": plan.feasible,
        "seconds": plan.seconds,
        "complete": plan.complete,
        "gap": None if plan.gap == inf else plan.gap,
        "widened": plan.widened,
        "objective": plan.objective,
        "ranking": [_entry(one) for one in plan.ranking],
        "safe": None if plan.safe is None else _entry(plan.safe),
        "plain": {name: None if one is None else _entry(one) for name, one in plan.baselines.items()},
        "rejected": {
            name: {"count": one.count, "example": one.example} for name, one in plan.rejected.items()
        },
        "nearest": None if plan.nearest is None else _entry(plan.nearest),
        "written": str(written) if written and plan.ranking else None,
    }


def _entry(one: Ranked) -> dict[str, Any]:
    from stretto.cli.predict import memory_facts

    made, job = one.estimate, one.estimate.job
    sizes = dict(job.layout.sizes)
    return {
        "layout": one.layout,
        "sizes": sizes,
        "gpus": job.layout.world,
        "micro_batch": job.micro_batch,
        "microbatches": job.microbatches,
        "schedule": job.schedule,
        "options": dict(job.options),
        "sequence_parallel": job.sequence_parallel,
        "context": job.context,
        "dp": {"mode": job.dp.mode, **job.dp.shards, "offload": job.dp.offload},
        "recompute": {"mode": job.recompute.mode, "blocks": job.recompute.blocks},
        "step_time_s": made.seconds,
        "low": made.low,
        "high": made.high,
        "widths": dict(made.widths),
        "tokens_per_s": made.tokens_per_s,
        "tokens_per_dollar": one.tokens_per_dollar,
        "tflops_per_gpu": made.tflops_per_gpu,
        "mfu": made.mfu,
        "bubble": made.bubble,
        "dominant": made.dominant,
        "parts": dict(made.parts),
        "why": one.reason,
        **memory_facts(made.memory),
    }


# ------------------------------------------------------------------ text


def show(to: Console, plan: Plan, task: Task, model: str) -> None:
    """Print what is planned, the ranking as a table, and the reasons."""
    from stretto.view.plan_texts import plan_setting, search_text

    for name, text in plan_setting(task.job, task.cluster, task.assumptions, model).items():
        labelled(to, name, text, _INDENT)
    labelled(to, "search", search_text(plan), _INDENT)
    if plan.widened:
        text = (
            "no conventional layout fits without offload and without ZeRO 2 and 3 in pipelines, so these "
            "were tried too"
        )
        labelled(to, "", text, _INDENT)
    if not plan.ranking:
        _nothing(to, plan)
    else:
        to.print(_table(to, plan), soft_wrap=True)
        for place, one in enumerate(plan.ranking, 1):
            labelled(to, f"{place:>2}.", one.layout, 4)
            labelled(to, "", one.reason, 4)
        _beside(to, plan, task.memory_headroom)
    for reason, one in plan.rejected.items():
        labelled(to, "rejected,", f"{reason}: {one.count:,}, such as {one.example}", _INDENT)
    if task.job.shape.unsupported_parts:
        parts = ", ".join(task.job.shape.unsupported_parts)
        labelled(to, "training", f"cannot build this model yet: it has {parts}", _INDENT)


_INDENT = 10  # columns of a label


def _beside(to: Console, plan: Plan, room: float) -> None:
    """The fastest safe layout, and what people run without a search, with their distances to the first."""
    free = f" with {room / GIB:.4g} GiB free" if room else ""
    safe = f"none was found{free}" if plan.safe is None else f"fastest that certainly fits{free}: "
    labelled(to, "safe", safe + (_distance(plan.safe, plan) if plan.safe else ""), _INDENT)
    for name, one in plan.baselines.items():
        text = "none was found that fits" if one is None else _distance(one, plan)
        labelled(to, "plain", f"{name}: {text}", _INDENT)


def _distance(one: Ranked, plan: Plan) -> str:
    first = plan.ranking[0]
    if one.layout == first.layout:
        return "the first"
    more = one.estimate.seconds / first.estimate.seconds - 1
    tight = ", tight" if one.estimate.memory is not None and one.estimate.memory.verdict == "tight" else ""
    return f"{one.layout}: {one.estimate.seconds:.4g} s ({100 * more:+.1f}%{tight}: {one.reason})"


def _nothing(to: Console, plan: Plan) -> None:
    if plan.complete:
        to.print("nothing fits")
    else:
        text = (
            f"after {plan.seconds:.1f} s: nothing was found that fits, and not everything was examined "
            "(more with --seconds; or help it with --fix, as in --fix tp=8)"
        )
        labelled(to, "cut short", text, _INDENT)
    if plan.nearest is not None:
        labelled(to, "nearest", f"{plan.nearest.layout}: {plan.nearest.reason}", _INDENT)


def _table(to: Console, plan: Plan) -> Table:
    """One row per layout."""
    rows = [_row(place, one) for place, one in enumerate(plan.ranking, 1)]
    if plan.objective != "tokens_per_dollar":
        rows = [{name: cell for name, cell in row.items() if name != "tokens/$"} for row in rows]
    return fitting_table(
        to,
        rows,
        left=("device", "fits", "main overhead"),
        optional=("device", "interval", "TFLOP/s", "bubble", "main overhead", "tokens/s", "MFU"),
    )


def _row(place: int, one: Ranked) -> dict[str, str]:
    made, fit = one.estimate, one.estimate.memory
    return {
        "": str(place),
        "step s": f"{made.seconds:.4g}",
        "interval": f"{made.low:.3g}-{made.high:.3g}",
        "tokens/s": f"{made.tokens_per_s:,.0f}",
        "TFLOP/s": tflops_text(made.tflops_per_gpu),
        "MFU": f"{100 * made.mfu:.1f}%",
        "bubble": f"{100 * made.bubble:.1f}%",
        "GiB": "" if fit is None else f"{fit.device.mid / GIB:.1f}",
        "device": "" if fit is None else _bar(fit),
        "fits": "" if fit is None else fit.verdict,
        "main overhead": made.dominant,
        "tokens/$": "" if one.tokens_per_dollar is None else f"{one.tokens_per_dollar:,.0f}",
    }


def _bar(fit: Fit) -> str:
    """The device's memory as a bar: what is likely to be used, what may be, and the rest."""
    if fit.capacity == inf:
        return ""
    used, most = (min(_BAR, round(_BAR * size / fit.capacity)) for size in (fit.device.mid, fit.device.high))
    return "#" * used + "+" * (most - used) + "." * (_BAR - most)
