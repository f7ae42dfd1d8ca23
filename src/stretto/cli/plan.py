"""`stretto plan`: the best layouts of a model on a cluster."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, cast

import typer

from stretto.cli import interop
from stretto.cli.options import check_choice, grouped, software_named
from stretto.cli.output import (
    check_writable,
    command_app,
    say_no,
    show_search,
    tflops_text,
    train_command,
)
from stretto.cli.plan_options import PlanOptions
from stretto.cli.report import Cell, CommandReport, number, text
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stretto.job.data_parallel import Dtype
    from stretto.job.job import Job
    from stretto.planner.search.ranking import Baseline, Plan, Ranked
    from stretto.planner.search.task import Objective, SearchTask
    from stretto.planner.what_if import Answer
    from stretto.run.config.schema import TrainConfig


app = command_app()

GIB = 2**30
_CUT_SHORT = 3  # exit code: nothing was found, and it is not known that nothing fits
_BAR = 12  # characters of a full device
_VARIANTS = 4  # of a layout that are printed


@app.command(
    epilog="Examples: stretto plan --model gpt3-175b --cluster dgx-a100-80gb:1024 --batch 1536 --fix tp=8 "
    "--write plan.yaml; stretto plan --model llama3-70b --cluster h100:64 --batch 512 --what-if"
)
@grouped(PlanOptions)
def plan(options: PlanOptions) -> None:
    """Search all legal layouts, predict their time and memory, and rank the best.

    For a recommender (--model dlrm-113b, or its CONFIG), places the tables and predicts samples per second.
    --fix then takes split=row,data, place=device, optimizer=adagrad and others; --placement evaluates a file
    that --write wrote.

    Beside the best layouts it shows the best that certainly fits and what people run without a search: DDP,
    FSDP, hybrid FSDP, experts x FSDP or a pipeline, tensor parallelism in a node x FSDP or a pipeline.

    With --for only layouts that the framework has are searched, at the costs that they have there, and --emit
    prints the first as its config; for a recommender --emit torchrec writes TorchRec's sharding plan.

    Exit code 1 if nothing fits; 3 if the search was cut short before it found or excluded anything.
    """
    from stretto.recommender.config.load import load_config
    from stretto.recommender.shape import is_dlrm
    from stretto.run.config.schema import TrainConfig

    target = options.emit or options.target
    if options.target not in (None, target):
        raise StrettoError(
            f"--for is {options.target} and --emit is {target}: a plan is for one framework",
            hint="leave --for out: --emit plans for its framework",
        )
    framework = interop.framework_named(options.emit, {"row": options.row, "output": options.output})
    framework = framework or interop.framework_named(target, {})
    recommender = options.model is not None and is_dlrm(options.model)
    config = None if options.config is None else load_config(options.config, options.overrides or [])
    if recommender or (options.model is None and config is not None and not isinstance(config, TrainConfig)):
        if isinstance(config, TrainConfig):
            raise StrettoError(
                f"{options.config} is not the config of a recommender",
                hint=f"leave it out, or --model {options.model}",
            )
        from stretto.cli.plan_recommender import plan_recommender

        plan_recommender(options, config)
        return
    if options.placement is not None:
        raise StrettoError("--placement is for recommenders", hint="as in --model dlrm-113b")
    interop.check_trains_language(target)
    base = None
    if options.config is not None:
        from stretto.cli.jobs import load_language

        base = load_language(options.config, options.overrides or [])
    task, run = _task(options, base), None
    if framework is not None:
        run = None if base is None else interop.emit.run_values(base)
        task = interop.planned.task_for(framework, task, options.fix or [], run)
    if options.software is not None:
        software = software_named(options.software)
        task = replace(task, assumptions=replace(task.assumptions, software=software))
    if options.what_if and options.emit is not None and options.output is None:
        raise StrettoError(
            "--what-if adds lines to the plan, and --emit prints a config in its place",
            hint=f"add --output FILE, or --for {target} instead of --emit {target}",
        )
    check_writable(options.html)
    if options.write is not None and (base is None or base.shape() != task.job.shape):
        from stretto.run.config.written import model_section

        try:  # before a long search: not every model can be described to training
            model_section(task.job.shape)
        except StrettoError as error:
            hint = f"leave --write out, or {error.hint}"
            raise StrettoError(f"--write: {error.message}", hint=hint) from None

    result = _search(task)
    answers: list[Answer] = []
    if options.what_if:
        from stretto.planner.what_if import answer, changes

        listed = list(changes(task))
        for count, change in enumerate(listed, 1):
            with show_search(f"what if {count} of {len(listed)}, {change.name}") as progress:
                answers.append(answer(change, result, task, progress))
    emitted = None
    if framework is not None and options.emit is not None and result.ranking:
        emitted = interop.planned.emitted_row(framework, result, options.row, run)
        if options.output is not None or not options.as_json:
            interop.print_emitted(emitted, options.output)
    title = None if framework is None else framework.title
    report = _report(options, task, base, result, answers=answers, framework=title, emitted=emitted)
    report.print(options.as_json)
    if not result.ranking:
        raise say_no() if result.complete else typer.Exit(_CUT_SHORT)


def _search(task: SearchTask) -> Plan:
    """Search, and show the best so far; once something was found, Ctrl-C ends a search as its limit does."""
    from stretto.planner.search.search import search_rounds

    result: Plan | None = None
    with show_search() as progress:
        try:
            for result in search_rounds(task, progress):
                if progress is not None and result.ranking:
                    first = result.ranking[0]
                    progress(best=f"{first.estimate.seconds:.4g} s, {first.layout}")
        except KeyboardInterrupt:
            if result is None or not result.ranking:
                raise
            print("stopped; the best so far:", file=sys.stderr)
    assert result is not None
    return result


# ------------------------------------------------------------------ the task


def _task(options: PlanOptions, base: TrainConfig | None) -> SearchTask:
    """The search that the options and the config, if there is one, ask for."""
    from stretto.planner.estimate import usual_dtype
    from stretto.planner.machines.catalogue import find_cluster
    from stretto.planner.search.fixed import fixed
    from stretto.planner.search.task import SearchTask

    check_choice("--objective", options.objective, ("time", "tokens_per_dollar"))
    if options.cluster is None:
        raise StrettoError("--cluster is missing", hint="as in --cluster dgx-a100-80gb:64")
    cluster = find_cluster(options.cluster, options.max_gpus)
    if cluster.nodes is None:
        raise StrettoError(f"--cluster {options.cluster!r} has no size", hint=f"as in {options.cluster}:64")
    return SearchTask(
        job=_job(options, base, usual_dtype(cluster.device)),
        cluster=cluster,
        objective=cast("Objective", options.objective),
        top=options.top,
        seconds=options.seconds,
        memory_headroom=options.room * GIB,
        asynchronous=options.asynchronous,
        allow_offload=options.wide,
        fixed=fixed(options.fix or []),
        smaller=options.max_gpus is not None,
    )


def _job(options: PlanOptions, base: TrainConfig | None, default_dtype: Dtype) -> Job:
    """The job without a layout."""
    from stretto.job.data_parallel import Precision
    from stretto.job.presets import find_shape
    from stretto.planner.search.task import job_to_plan
    from stretto.run.config.job import job_of

    if base is None:
        if options.model is None or options.batch is None:
            missing = "--model" if options.model is None else "--batch"
            raise StrettoError(
                f"{missing} is missing", hint="as in --model llama3-8b --batch 512, or a CONFIG"
            )
        shape = find_shape(options.model)
        if options.target_sequence is not None and not shape.encoder_layers:
            raise StrettoError(
                f"--target-sequence is {options.target_sequence}, and the model has no encoder",
                hint="leave it out, or name a model such as t5-3b",
            )
        job = job_to_plan(
            shape=shape,
            global_batch=options.batch,
            sequence=options.sequence or shape.pretraining_sequence,
            target_sequence=options.target_sequence or 0,
        )
        job = replace(job, precision=Precision(dtype=default_dtype))
    else:
        configured = job_of(base)
        job = job_to_plan(
            shape=find_shape(options.model) if options.model else configured.shape,
            global_batch=options.batch or configured.global_batch,
            sequence=options.sequence or configured.sequence,
            target_sequence=options.target_sequence or configured.target_sequence,
        )
        job = replace(
            job,
            precision=configured.precision,
            optimiser=configured.optimiser,
            attention=configured.attention,
            loss_chunk=configured.loss_chunk,
            vocab_multiple=configured.vocab_multiple,
            bucket=configured.bucket,
            unified_memory=configured.unified_memory,
            steps_between_drains=configured.steps_between_drains,
            async_save=configured.async_save,
        )
    if options.precision is not None:
        dtypes: dict[str, Dtype] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
        check_choice("--precision", options.precision, dtypes)
        job = replace(job, precision=replace(job.precision, dtype=dtypes[options.precision]))
    return job


# ------------------------------------------------------------------ the report


def _report(
    options: PlanOptions,
    task: SearchTask,
    base: TrainConfig | None,
    plan: Plan,
    *,
    answers: Sequence[Answer],
    framework: str | None,
    emitted: str | None,
) -> CommandReport:
    from stretto.run.config.written import required_fields, written
    from stretto.view.plan_record import plan_record, what_if_record
    from stretto.view.plan_texts import plan_setting

    required = list(required_fields(base))
    model = options.model
    if model is None:
        assert base is not None
        model = base.model.preset or f"{base.model.family} of {options.config}"
    setting = plan_setting(task.job, task.cluster, task.assumptions, model)
    unsaid = [name for name in ("batch", "sequence") if getattr(options, name) is None]
    source = options.config
    if source is None:
        scaled = task.sequence < task.shape.sequence and "sequence" in unsaid
        source = f"{model}'s config" + ", before its positions were scaled" * scaled
    if unsaid:
        setting["batch"] += f" (no --{' and no --'.join(unsaid)}: as in {source})"
    if framework is not None:
        setting["framework"] = framework
    changed = what_if_record(plan, task, answers)
    question = {
        "what_if": changed,
        "required": required,
        "emitted": emitted,
        "framework": framework,
        "software": setting["software"],
        "batch": task.global_batch,
        "sequence": task.sequence,
        "defaults": dict.fromkeys(unsaid, source),
    }
    written_to = str(options.write) if options.write and plan.ranking else None
    report = CommandReport(lambda: {**plan_record(plan), "written": written_to, **question})
    if options.html is not None:
        from stretto.view.page import recorded_page
        from stretto.view.plan_record import drawn_plan

        commands = _next_commands(options, required, setting["software"])
        commands = {} if task.job.shape.unsupported_parts else commands
        record = drawn_plan(plan, model, commands)
        page = recorded_page(record["title"], "plan", {"plan": {**record, "what_if": changed}})
        report.write(options.html, page, quiet=True)
    if emitted is None or options.output is not None:
        for name, value in setting.items():
            report.value(name, value)
        add_plan(report, plan, task)
        if changed is not None:
            _add_what_if(report, plan, task, answers=answers, binds=changed["binds"])
    elif unsaid and not options.as_json:
        print(f"note: planned for {setting['batch']}", file=sys.stderr)
    if options.write is not None and plan.ranking:
        ranked = plan.ranking[0]
        estimate = ranked.estimate
        about = (
            f"{ranked.layout}\n"
            f"predicted on {estimate.job.layout.world} x {estimate.cluster.device.name}: "
            f"{estimate.seconds:.4g} s a step ({estimate.low:.4g} to {estimate.high:.4g}), "
            f"{estimate.tflops_per_gpu:.4g} TFLOP/s a device"
        )
        train = train_command(options.write, required)
        report.write(options.write, written(estimate.job, base, about), note=f": {train}")
    if options.output is not None and emitted is not None:
        report.line(f"wrote {options.output}")
    return report


def _next_commands(options: PlanOptions, required: list[str], software: str) -> dict[str, str]:
    """Commands for the next steps, by what each does."""
    command = ["stretto", options.context.info_name or ""]
    for parameter in options.context.command.params:
        value = options.context.params.get(parameter.name or "")
        skipped = parameter.name in ("write", "html", "as_json")
        if skipped or value is None or value == parameter.default or value == ():
            continue
        values = [str(each) for each in (value if isinstance(value, list | tuple) else [value])]
        if parameter.param_type_name == "argument":
            command += values
        elif value is True:
            command.append(parameter.opts[0])
        else:
            command += [word for each in values for word in (parameter.opts[0], each)]
    config = options.write or Path("planned.yaml")
    predicted = f"stretto predict {config} --cluster {options.cluster}"
    return {
        "write the first as a config": f"{shlex.join(command)} --write {config}",
        "predict it, and variants": predicted + f" --software {software}" * (software != "today"),
        "its memory, tensor by tensor": f"stretto memory {config}",
        "train it": train_command(config, required),
    }


def add_plan(report: CommandReport, plan: Plan, task: SearchTask) -> None:
    """Add the ranking as a table, and the reasons."""
    from stretto.view.plan_texts import search_text

    report.value("search", search_text(plan))
    if plan.widened:
        report.value(
            "",
            "layouts with offload, and with ZeRO 2 and 3 in pipelines, were tried too: without, no "
            "conventional one was found that fits and is as fast",
        )
    if plan.ranking:
        _add_ranking(report, plan)
        free = f" with {task.memory_headroom / GIB:.4g} GiB free" if task.memory_headroom else ""
        safe = f"none was found{free}"
        if plan.safe is not None:
            safe = f"best that certainly fits{free}: {_distance(plan.safe, plan)}"
        report.value("safe", safe)
        for error in plan.ranking[0].estimate.known_errors:
            report.value("wrong", error)
    else:
        if plan.complete:
            report.line("nothing fits")
        else:
            report.value(
                "cut short",
                f"after {plan.seconds:.1f} s: nothing was found that fits, and not everything was examined "
                "(more with --seconds; or help it with --fix, as in --fix tp=8)",
            )
        if plan.nearest is not None:
            report.value("nearest", f"{plan.nearest.layout}: {plan.nearest.reason}")
    for name, plain in plan.baselines.items():
        report.value("plain", f"{name}: {_baseline_text(plain, plan)}")
    for reason, refusals in plan.rejected.items():
        example = f", such as {refusals.example}" * bool(refusals.example)
        report.value("rejected,", f"{reason}: {refusals.count:,}{example}")
    if task.job.shape.unsupported_parts:
        parts = ", ".join(task.job.shape.unsupported_parts)
        report.value("training", f"cannot build this model yet: it has {parts}")


def _add_ranking(report: CommandReport, plan: Plan) -> None:
    """Add a table with a row per layout, then each layout in words."""
    columns = [
        number(""),
        number("step s", ".4g"),
        number("interval"),
        number("tokens/s", ",.0f"),
        number("TFLOP/s", tflops_text),
        number("MFU", ".1%"),
        number("bubble", ".1%"),
        number("GiB", ".1f"),
        text("device"),
        text("fits"),
        text("main overhead"),
    ]
    rows = list[list[Cell]]()
    for rank, ranked in enumerate(plan.ranking, 1):
        estimate, memory = ranked.estimate, ranked.estimate.memory
        bar = ""  # memory that is likely to be used, that may be, and the remainder
        if memory is not None and memory.capacity < inf:
            likely, possible = (
                min(_BAR, round(_BAR * bytes_ / memory.capacity))
                for bytes_ in (memory.device.mid, memory.device.high)
            )
            bar = "#" * likely + "+" * (possible - likely) + "." * (_BAR - possible)
        rows.append(
            [
                rank,
                estimate.seconds,
                f"{estimate.low:.3g}-{estimate.high:.3g}",
                estimate.tokens_per_s,
                estimate.tflops_per_gpu,
                estimate.mfu,
                estimate.bubble,
                None if memory is None else memory.device.mid / GIB,
                bar,
                None if memory is None else memory.verdict,
                estimate.dominant,
            ]
        )
    if plan.objective == "tokens_per_dollar":
        columns.append(number("tokens/$", ",.0f"))
        for row, ranked in zip(rows, plan.ranking, strict=True):
            row.append(ranked.tokens_per_dollar)
    report.table(
        columns,
        rows,
        optional=("device", "interval", "TFLOP/s", "bubble", "main overhead", "tokens/s", "MFU"),
    )
    for rank, ranked in enumerate(plan.ranking, 1):
        report.value(f"{rank:>2}.", ranked.layout, indent=4)
        report.value("", ranked.reason, indent=4)
        if ranked.variants:
            more = f"; {len(ranked.variants) - _VARIANTS} more" * (len(ranked.variants) > _VARIANTS)
            report.value("", "as fast: " + "; ".join(ranked.variants[:_VARIANTS]) + more, indent=4)


def _add_what_if(
    report: CommandReport,
    plan: Plan,
    task: SearchTask,
    *,
    answers: Sequence[Answer],
    binds: Mapping[str, float],
) -> None:
    """Add a line for each change, and what binds."""
    from stretto.planner.search.ranking import TIE
    from stretto.planner.what_if import work_of

    first = plan.ranking[0].layout if plan.ranking else ""
    changed = "change" if plan.objective == "time" else "tokens/$"
    columns = [text("what if"), number("step s", ".4g"), number("tokens/s", ",.0f"), number(changed, "+.1%")]
    rows = list[list[Cell]]()
    for item in answers:
        if (best := item.best) is not None:
            sizes, *choices = best.layout.split(", ")
            new = [choice.split() for choice in choices if choice not in first]
            short = (sizes, *(" ".join(terms if len(terms) < 4 else terms[:2]) for terms in new[-1:]))
            layout = "the first" if best.layout == first else ", ".join(short)
            estimate = best.estimate
            rows.append([item.change.name, estimate.seconds, estimate.tokens_per_s, item.gain, layout])
    report.table([*columns, text("layout")], rows, optional=("tokens/s", "layout"))
    work = f"each has {work_of(task):g} s of work, an eighth of --seconds but at least 0.5"
    report.value("", f"{work}; with more they may be better")
    for item in answers:
        if item.best is None:
            report.value("not", f"{item.change.name}: {item.reason}")
        elif item.unchanged > TIE:
            faster = f"its layout is {item.unchanged:.1%} faster without the change too"
            report.value("missed", f"{item.change.name}: {faster}: plan with more --seconds")
    if binds:
        (name, share), *others = binds.items()
        without = {"bubble": "without it", "host": "without it", "device memory": "with larger cards"}
        more = without.get(name, "if twice as fast")
        smaller = ", ".join(f"{other} {saved:.1%}" for other, saved in others)
        report.value("binds", f"{name}: {share:.1%} of the step would go {more}; then {smaller}")


def _baseline_text(plain: Baseline, plan: Plan) -> str:
    """The fastest layout of a kind, and the fastest safe one if it is another."""
    if plain.fastest is None:
        return plain.missing
    if not plan.ranking:
        return f"{plain.fastest.layout}: {plain.fastest.estimate.seconds:.4g} s"
    text = _distance(plain.fastest, plan)
    if plain.safe is None:
        return f"{text}; none was found that certainly fits"
    if plain.safe.layout == plain.fastest.layout:
        return text
    seconds = plain.safe.estimate.seconds
    slower = seconds / plan.ranking[0].estimate.seconds - 1
    return f"{text}; certainly fits: {plain.safe.layout}: {seconds:.4g} s ({slower:+.1%})"


def _distance(ranked: Ranked, plan: Plan) -> str:
    """A layout, and how much slower it is than the first."""
    first, estimate = plan.ranking[0], ranked.estimate
    if ranked.layout == first.layout:
        return "the first"
    slower = estimate.seconds / first.estimate.seconds - 1
    return f"{ranked.layout}: {estimate.seconds:.4g} s ({slower:+.1%}: {ranked.reason})"
