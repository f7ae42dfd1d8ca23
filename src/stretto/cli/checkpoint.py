"""`stretto checkpoint`: list and verify checkpoints, convert to and from Hugging Face, export tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from stretto.cli import interop
from stretto.cli.options import Json, grouped
from stretto.cli.output import byte_progress, command_app, say_no
from stretto.cli.report import Cell, CommandReport, Record, number, text
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from stretto.job.shape import ModelShape

app = command_app(help="List, verify, export and import checkpoints.", no_args_is_help=True)

_Run = Annotated[
    Path, typer.Argument(metavar="PATH", help="A run, a folder of checkpoints, or a checkpoint.")
]


@app.command("list", epilog="Example: stretto checkpoint list runs/quickstart")
def list_checkpoints(path: _Run, as_json: Json = False) -> None:
    """List the checkpoints of a run, newest first; compares file sizes, does not read contents."""
    from stretto.engine.checkpoint.manifest import quick_problems

    _report([_describe(checkpoint, quick_problems) for checkpoint in _checkpoints(path)]).print(as_json)


@app.command(epilog="Example: stretto checkpoint verify runs/quickstart")
def verify(path: _Run, as_json: Json = False) -> None:
    """Read every byte and compare checksums; exit code 1 when a checkpoint is damaged."""
    from stretto.engine.checkpoint.manifest import problems

    described = [_describe(checkpoint, problems) for checkpoint in _checkpoints(path)]
    _report(described).print(as_json)
    if not all(record["ok"] for record in described):
        raise say_no()


_FORMATS = (
    "huggingface: config.json and safetensors. dcp: torch.distributed.checkpoint as torchtitan has it, "
    "AdamW's states included. megatron: Megatron-LM's torch_dist, Adam's states included."
)


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of `stretto checkpoint export`."""

    path: _Run
    out: Annotated[Path, typer.Option(metavar="PATH", help="The folder to write; with --table, the file.")]
    table: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Export this embedding table only, to a .npy or .safetensors file."
        ),
    ] = None
    state: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="With --table: export this optimizer state of it instead."),
    ] = None
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Type of the exported weights; by default as in the checkpoint."),
    ] = None
    shard_gb: Annotated[
        float, typer.Option(min=0.001, help="Most of a file, in 10^9 bytes; a larger model is several files.")
    ] = 5.0
    form: Annotated[
        Literal["huggingface", "dcp", "megatron", "torchrec"] | None,
        typer.Option(
            "--format",
            help=f"Of a language model, {_FORMATS}  [default: huggingface]  Of a recommender, torchrec: a "
            "state dict of TorchRec's DLRM; by default what stretto.Scorer loads.",
        ),
    ] = None
    dense_only: Annotated[
        bool, typer.Option("--dense-only", help="Of a recommender: the dense network without the tables.")
    ] = False
    torchtitan: Annotated[
        Literal["0.3", "0.2"], typer.Option(help="With --format dcp: the version that is to load it.")
    ] = "0.3"
    expert_parallel: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With --format megatron, of a model with experts: --expert-model-parallel-size as it is "
            "loaded. Adam's states differ between 1 and more; the default is more.",
        ),
    ] = None
    adapters: Annotated[
        bool,
        typer.Option("--adapters", help="Of a run with adapters (LoRA): write these only, as peft does."),
    ] = False
    merge: Annotated[
        bool, typer.Option("--merge", help="Of a run with adapters: add them to the weights.")
    ] = False
    as_json: Json = False


@app.command(
    epilog="Example: stretto checkpoint export runs/quickstart --out exported --dtype bfloat16 --shard-gb 2"
)
@grouped(ExportOptions)
def export(options: ExportOptions) -> None:
    """Write a model as Hugging Face or torchtitan loads it, a recommender for serving, or one table.

    The folder gets config.json, safetensors files, and the run's tokenizer, chat template and generation
    settings: AutoModelForCausalLM and AutoTokenizer load it. Of a run, the newest checkpoint is exported,
    whatever layout wrote it; one tensor at a time is in memory. With --adapters, PeftModel.from_pretrained
    loads the folder onto the base. Of a recommender, the folder gets the dense network (safetensors and
    torch.export), the tables, and the transform of its clicks: stretto.Scorer.load takes it.
    """
    adapters, form = options.adapters, options.form
    if adapters and options.merge:
        raise StrettoError("--adapters and --merge", hint="one of the two: merged weights have no adapters")
    if options.state is not None and options.table is None:
        raise StrettoError("--state without --table", hint="name the table whose state it is")
    checkpoint = _newest(options.path)
    if options.table is not None:
        _export_table(options, checkpoint, options.table)
        return
    if _is_recommender(checkpoint):
        _export_recommender(options, checkpoint)
        return
    if options.dense_only or form == "torchrec":
        wrong = "--dense-only" if options.dense_only else "--format torchrec"
        raise StrettoError(
            f"{checkpoint} is of a language model, and {wrong} is for recommenders", hint=f"leave {wrong} out"
        )
    if form not in (None, "huggingface"):
        if adapters or options.merge:
            raise StrettoError(
                "--adapters and --merge are of --format huggingface", hint=f"leave out --format {form}"
            )
        if options.dtype is not None:
            raise StrettoError(
                f"--dtype with --format {form}", hint="weights are converted as they are loaded"
            )
        interop.checkpoint.export(
            checkpoint,
            options.out,
            form,
            torchtitan=options.torchtitan,
            experts_spread=options.expert_parallel != 1,
            as_json=options.as_json,
        )
        return
    import torch

    from stretto.run.launch.lease import lease
    from stretto.run.train.exported import export_model

    dtype: torch.dtype | None = None if options.dtype is None else getattr(torch, options.dtype)
    out = options.out
    with lease(out):  # an active run keeps its tokenizer there
        if adapters:
            from stretto.engine.checkpoint.huggingface.adapters import export_adapters

            written = export_adapters(checkpoint, out, dtype)
        else:
            with byte_progress("export") as progress:
                shard_bytes = int(options.shard_gb * 1e9)
                written = export_model(checkpoint, out, shard_bytes, dtype, progress, merge=options.merge)
    files = [str(file) for file in written]
    report = CommandReport({**_intact(checkpoint), "path": str(out), "files": files})
    report.line(f"{checkpoint} written to {out}:")
    report.lines(f"  {file}" for file in files)
    report.print(options.as_json)


def _is_recommender(checkpoint: Path) -> bool:
    from stretto.engine.checkpoint.manifest import read_manifest

    sizes = read_manifest(checkpoint).meta.get("model")
    return isinstance(sizes, dict) and isinstance(sizes.get("tables"), dict)


def _export_recommender(options: ExportOptions, checkpoint: Path) -> None:
    """Export a recommender for serving, or with TorchRec's names."""
    from stretto.recommender.serve.export import export_recommender
    from stretto.run.launch.lease import lease

    out, form = options.out, options.form
    others = {
        f"--format {form}": form not in (None, "torchrec"),
        "--dense-only with --format torchrec": options.dense_only and form == "torchrec",
        "--dtype": options.dtype is not None,
        "--adapters": options.adapters,
        "--merge": options.merge,
        "--shard-gb": options.shard_gb != ExportOptions.shard_gb,
        "--torchtitan": options.torchtitan != ExportOptions.torchtitan,
        "--expert-parallel": options.expert_parallel is not None,
    }
    if wrong := [option for option, is_given in others.items() if is_given]:
        raise StrettoError(f"{wrong[0]}, and {checkpoint} is of a recommender", hint=f"leave {wrong[0]} out")
    with lease(out), byte_progress("export") as progress:
        if form == "torchrec":
            written, notes = interop.checkpoint.export_torchrec(checkpoint, out)
        else:
            written, notes = export_recommender(
                checkpoint, out, dense_only=options.dense_only, progress=progress
            )
    files = [str(file) for file in written]
    report = CommandReport({**_intact(checkpoint), "path": str(out), "files": files, "notes": notes})
    report.line(f"{checkpoint} written to {out}:")
    report.lines(f"  {file}" for file in files)
    report.lines(f"note: {note}" for note in notes)
    if form is None and not options.dense_only:
        report.line(f'to score with it: stretto.Scorer.load("{out}")')
    report.print(options.as_json)


def _intact(checkpoint: Path) -> dict[str, Any]:
    """The beginning of the JSON of a command that read or wrote an intact checkpoint."""
    return {"checkpoints": [{"path": str(checkpoint), "ok": True}], "ok": True}


def _export_table(options: ExportOptions, checkpoint: Path, table: str) -> None:
    """Export one embedding table, or an optimizer state of it."""
    from stretto.recommender.checkpoint.export import export_table

    out, state = options.out, options.state
    exported = export_table(checkpoint, table, out, state)
    report = CommandReport(
        {
            **_intact(checkpoint),
            "path": str(out),
            "files": [str(out)],
            "table": table,
            "state": state,
            "shape": list(exported.shape),
            "dtype": exported.dtype,
        }
    )
    title = table if state is None else f"{table}, {state}"
    shape = " x ".join(str(size) for size in exported.shape)
    report.line(f"{title} of {checkpoint}, {shape} {exported.dtype}, written to {out}")
    report.print(options.as_json)


@app.command("import", epilog="Example: stretto checkpoint import Llama-3.1-8B --out runs/llama")
def import_model(
    source: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="A folder with config.json, safetensors files and a tokenizer."),
    ],
    out: Annotated[Path, typer.Option(metavar="RUN", help="The run folder to make.")],
    form: Annotated[
        Literal["huggingface", "dcp", "megatron"], typer.Option("--format", help=_FORMATS)
    ] = "huggingface",
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="With --format dcp, which says nothing of it: the model, a name of `stretto catalogue`, a "
            "config.json, or a config of a run. With --format megatron: in place of the checkpoint's own.",
        ),
    ] = None,
    weights_only: Annotated[
        bool,
        typer.Option("--weights-only", help="With --format dcp, megatron: without the optimiser's states."),
    ] = False,
    adapters: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Adapters of this model (LoRA), as peft writes them.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a run of a published model of Hugging Face, or of a checkpoint of torchtitan or Megatron.

    GPT-2, Llama, Mistral, Mixtral, Qwen2, Qwen3 (with and without experts), Gemma 2 and 3, gpt-oss,
    DeepSeek-V2 and V3, T5, BART. RUN gets the weights as the checkpoint of step 0, the tokenizer with what
    belongs to it, and a config.yaml that trains on from them. Weights keep the files' type; those in 8-bit
    or 4-bit blocks become bfloat16. One tensor at a time is in memory. What is not taken or not known is
    listed.
    """
    from stretto.engine.checkpoint.files import size_text
    from stretto.run.train.imported import import_model as import_model_folder

    if form == "huggingface" and (model is not None or weights_only):
        raise StrettoError(
            "--model and --weights-only are of --format dcp and megatron", hint="add --format dcp"
        )
    # two files that no other format has
    if form != "megatron" and any(
        (source / name).exists() for name in ("latest_checkpointed_iteration.txt", "common.pt")
    ):
        raise StrettoError(f"{source} is a checkpoint of Megatron", hint="--format megatron")
    if form == "huggingface" and (source / ".metadata").is_file():
        raise StrettoError(
            f"{source} is a checkpoint of torch.distributed.checkpoint", hint="add --format dcp and --model"
        )
    if form != "huggingface" and adapters is not None:
        raise StrettoError("--adapters is of --format huggingface", hint=f"leave out --format {form}")
    shape = _shape(model) if form == "dcp" or (form == "megatron" and model is not None) else None
    with byte_progress("import") as progress:
        if form == "megatron":
            imported = interop.checkpoint.import_megatron(
                source, out, shape, states=not weights_only, progress=progress
            )
        elif shape is None:
            imported = import_model_folder(source, out, progress, adapters)
        else:
            imported = interop.checkpoint.import_dcp(
                source, out, shape, states=not weights_only, progress=progress
            )
    report = CommandReport(
        {
            **_intact(imported.checkpoint),
            "path": str(imported.checkpoint),
            "config": str(imported.config),
            "family": imported.shape.family,
            "parameters": imported.parameters,
            "bytes": imported.bytes,
            "dtype": imported.dtype,
            "tokenizer": None if imported.tokenizer is None else str(imported.tokenizer),
            "notes": imported.notes,
            "next": imported.next,
        }
    )
    report.line(
        f"{source}: {imported.shape.family}, {imported.parameters / 1e6:,.4g} M parameters, "
        f"{size_text(imported.bytes)} in {imported.dtype}"
    )
    report.line(f"  {imported.checkpoint}  the checkpoint")
    report.line(f"  {imported.config}  the model, and what trains on from there")
    if imported.tokenizer is not None:
        report.line(f"  {imported.tokenizer}")
    report.lines(f"note: {note}" for note in imported.notes)
    report.line(f"next:\n  {imported.next}")
    report.print(as_json)


def _shape(model: str | None) -> ModelShape:
    """The model of a preset, a config.json or a run's config."""
    from stretto.job.presets import find_shape
    from stretto.run.config import load

    if model is None:
        raise StrettoError(
            "--format dcp needs --model: torch.distributed.checkpoint keeps tensors, not what they compute",
            hint="--model llama3.1-8b, or the model's config.json, or a config.yaml with its section `model`",
        )
    path = Path(model)
    return load(path).shape() if path.suffix in (".yaml", ".yml") else find_shape(model)


def _checkpoints(path: Path) -> list[Path]:
    """The checkpoints at a path, newest first."""
    from stretto.engine.checkpoint.folder import checkpoints, is_checkpoint, resolve, runs_hint, step_of

    if is_checkpoint(path) or (path.is_dir() and step_of(path) is not None):
        return [path]
    if paths := checkpoints(resolve(path)):
        return paths
    hint = runs_hint(path, "name a run folder, its checkpoints folder, or one checkpoint")
    raise StrettoError(f"no checkpoint at {path}", hint=hint)


def _newest(path: Path) -> Path:
    """The newest checkpoint that is intact; damaged ones before it are reported."""
    from stretto.engine.checkpoint.manifest import problems

    checkpoints = _checkpoints(path)
    for checkpoint in checkpoints:
        if not (wrong := problems(checkpoint)):
            return checkpoint
        if len(checkpoints) > 1:
            typer.echo(f"checkpoint {checkpoint} is damaged: {wrong[0]}", err=True)
    raise StrettoError(f"no whole checkpoint at {path}", hint=f"see stretto checkpoint verify {path}")


def _describe(path: Path, find_problems: Callable[[Path], list[str]]) -> dict[str, Any]:
    """A checkpoint with its problems, for the command's JSON."""
    from stretto.engine.checkpoint.files import DamageError
    from stretto.engine.checkpoint.folder import step_of
    from stretto.engine.checkpoint.manifest import load_manifest

    wrong = find_problems(path)
    record: dict[str, Any] = {"path": str(path), "step": step_of(path), "ok": not wrong, "problems": wrong}
    try:
        manifest = load_manifest(path)
    except (DamageError, OSError):
        return record
    names = ("step", "bytes", "world", "tensors", "dtypes", "saved", "stretto", "torch", "meta")
    return record | {name: getattr(manifest, name) for name in names}


def _report(described: Sequence[Record]) -> CommandReport:
    """A row per checkpoint, then all problems."""
    from stretto.engine.checkpoint.files import size_text
    from stretto.engine.checkpoint.folder import HELD_OUT_LOSS

    losses = [
        loss
        for record in described
        if record["ok"] and isinstance(loss := record.get("meta", {}).get(HELD_OUT_LOSS), float)
    ]
    rows = list[tuple[Cell, ...]]()
    for record in described:
        state = "whole" if record["ok"] else "damaged"
        if record["ok"] and losses and record["meta"].get(HELD_OUT_LOSS) == min(losses):
            state = f"whole, least held-out loss: {min(losses):.4f}"
        size = size_text(record["bytes"]) if "bytes" in record else "?"
        rows.append(
            (str(record["step"]), size, record.get("world", "?"), str(record.get("saved", "?")), state)
        )
    report = CommandReport({"checkpoints": list(described), "ok": all(record["ok"] for record in described)})
    columns = [number("step"), number("size"), number("ranks"), text("saved"), text("state")]
    report.table(columns, rows)
    report.lines(f"{record['path']}: {problem}" for record in described for problem in record["problems"])
    return report
