"""`stretto checkpoint`: list and verify checkpoints, convert to and from Hugging Face, export tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from stretto.cli import interop
from stretto.cli.options import Json
from stretto.cli.output import byte_progress, command_app, report, say_no
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from rich.console import Console

    from stretto.run.train.imported import Imported
    from stretto.spec.shape import ModelShape

app = command_app(help="List, verify, export and import checkpoints.", no_args_is_help=True)

_Run = Annotated[
    Path, typer.Argument(metavar="PATH", help="A run, a folder of checkpoints, or a checkpoint.")
]


@app.command("list", epilog="Example: stretto checkpoint list runs/quickstart")
def list_checkpoints(path: _Run, as_json: Json = False) -> None:
    """List the checkpoints of a run, newest first; compares file sizes, does not read contents."""
    from stretto.engine.checkpoint.manifest import quick_problems

    _show([_facts(one, quick_problems) for one in _named(path)], as_json)


@app.command(epilog="Example: stretto checkpoint verify runs/quickstart")
def verify(path: _Run, as_json: Json = False) -> None:
    """Read every byte and compare checksums; exit code 1 when a checkpoint is damaged."""
    from stretto.engine.checkpoint.manifest import problems

    described = [_facts(one, problems) for one in _named(path)]
    _show(described, as_json)
    if not all(facts["ok"] for facts in described):
        raise say_no()


_Format = Annotated[
    Literal["huggingface", "dcp", "megatron"],
    typer.Option(
        "--format",
        help="huggingface: config.json and safetensors. dcp: torch.distributed.checkpoint as torchtitan has "
        "it, AdamW's states included. megatron: Megatron-LM's torch_dist, Adam's states included.",
    ),
]


@app.command(
    epilog="Example: stretto checkpoint export runs/quickstart --out exported --dtype bfloat16 --shard-gb 2"
)
def export(
    path: _Run,
    out: Annotated[Path, typer.Option(metavar="PATH", help="The folder to write; with --table, the file.")],
    table: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Export this embedding table only, to a .npy or .safetensors file."
        ),
    ] = None,
    state: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="With --table: export this optimizer state of it instead."),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Type of the exported weights; by default as in the checkpoint."),
    ] = None,
    shard_gb: Annotated[
        float, typer.Option(min=0.001, help="Most of a file, in 10^9 bytes; a larger model is several files.")
    ] = 5.0,
    form: _Format = "huggingface",
    torchtitan: Annotated[
        Literal["0.3", "0.2"], typer.Option(help="With --format dcp: the version that is to load it.")
    ] = "0.3",
    expert_parallel: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With --format megatron, of a model with experts: --expert-model-parallel-size as it is "
            "loaded. Adam's states differ between 1 and more; the default is more.",
        ),
    ] = None,
    adapters: Annotated[
        bool,
        typer.Option("--adapters", help="Of a run with adapters (LoRA): write these only, as peft does."),
    ] = False,
    merge: Annotated[
        bool, typer.Option("--merge", help="Of a run with adapters: add them to the weights.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write a model as Hugging Face's libraries or torchtitan load it, or one embedding table.

    The folder gets config.json, safetensors files, and the run's tokenizer, chat template and generation
    settings: AutoModelForCausalLM and AutoTokenizer load it. Of a run, the newest checkpoint is exported,
    whatever layout wrote it; one tensor at a time is in memory. With --adapters, PeftModel.from_pretrained
    loads the folder onto the base.
    """
    if adapters and merge:
        raise StrettoError("--adapters and --merge", hint="one of the two: merged weights have no adapters")
    if state is not None and table is None:
        raise StrettoError("--state without --table", hint="name the table whose state it is")
    one = _newest(path)
    if table is not None:
        _export_table(one, table, out, state, as_json)
        return
    if form != "huggingface" and (adapters or merge):
        raise StrettoError(
            "--adapters and --merge are of --format huggingface", hint=f"leave out --format {form}"
        )
    if form != "huggingface":
        if dtype is not None:
            raise StrettoError(
                f"--dtype with --format {form}", hint="weights are converted as they are loaded"
            )
        interop.checkpoint.export(
            one, out, form, torchtitan=torchtitan, experts_spread=expert_parallel != 1, as_json=as_json
        )
        return
    import torch

    from stretto.run.launch.lease import lease
    from stretto.run.train.exported import export_model

    kind: torch.dtype | None = None if dtype is None else getattr(torch, dtype)
    with lease(out):  # a run that is under way keeps its tokenizer there
        if adapters:
            from stretto.engine.checkpoint.huggingface.adapters import export_adapters

            written = export_adapters(one, out, kind)
        else:
            with byte_progress("export") as progress:
                written = export_model(one, out, int(shard_gb * 1e9), kind, progress, merge=merge)
    files = [str(file) for file in written]
    facts = {"checkpoints": [{"path": str(one), "ok": True}], "ok": True, "path": str(out), "files": files}
    report(facts, as_json, lambda console: console.print(f"{one} written to {out}:", *files, sep="\n  "))


def _export_table(one: Path, table: str, out: Path, state: str | None, as_json: bool) -> None:
    from stretto.recommender.checkpoint.export import export_table

    made = export_table(one, table, out, state)
    shape = " x ".join(str(size) for size in made.shape)
    facts = {
        "checkpoints": [{"path": str(one), "ok": True}],
        "ok": True,
        "path": str(out),
        "files": [str(out)],
        "table": table,
        "state": state,
        "shape": list(made.shape),
        "dtype": made.dtype,
    }
    what = table if state is None else f"{table}, {state}"
    report(
        facts,
        as_json,
        lambda console: console.print(
            f"{what} of {one}, {shape} {made.dtype}, written to {out}", markup=False, soft_wrap=True
        ),
    )


@app.command("import", epilog="Example: stretto checkpoint import Llama-3.1-8B --out runs/llama")
def import_model(
    source: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="A folder with config.json, safetensors files and a tokenizer."),
    ],
    out: Annotated[Path, typer.Option(metavar="RUN", help="The run folder to make.")],
    form: _Format = "huggingface",
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
    said.
    """
    from stretto.run.train.imported import import_model as import_model_folder

    if form == "huggingface" and (model is not None or weights_only):
        raise StrettoError(
            "--model and --weights-only are of --format dcp and megatron", hint="add --format dcp"
        )
    if form != "megatron" and any((source / name).exists() for name in _MEGATRON):
        what = f"{source} is a checkpoint of Megatron"
        raise StrettoError(what, hint="--format megatron")
    if form == "huggingface" and (source / ".metadata").is_file():
        what = f"{source} is a checkpoint of torch.distributed.checkpoint"
        raise StrettoError(what, hint="add --format dcp and --model")
    if form != "huggingface" and adapters is not None:
        raise StrettoError("--adapters is of --format huggingface", hint=f"leave out --format {form}")
    shape = None
    if form == "dcp" or (form == "megatron" and model is not None):
        shape = _model(model)
    with byte_progress("import") as progress:
        if form == "megatron":
            made = interop.checkpoint.import_megatron(
                source, out, shape, states=not weights_only, progress=progress
            )
        elif shape is None:
            made = import_model_folder(source, out, progress, adapters)
        else:
            made = interop.checkpoint.import_dcp(
                source, out, shape, states=not weights_only, progress=progress
            )
    facts = {
        "checkpoints": [{"path": str(made.checkpoint), "ok": True}],
        "ok": True,
        "path": str(made.checkpoint),
        "config": str(made.config),
        "family": made.shape.family,
        "parameters": made.parameters,
        "bytes": made.bytes,
        "dtype": made.dtype,
        "tokenizer": None if made.tokenizer is None else str(made.tokenizer),
        "notes": made.notes,
        "next": made.next,
    }
    report(facts, as_json, lambda console: _print_import(console, source, made))


_MEGATRON = ("latest_checkpointed_iteration.txt", "common.pt")  # which no other format has


def _model(name: str | None) -> ModelShape:
    """The model of a preset, a config.json or a run's config."""
    from stretto.run.config import load
    from stretto.spec.presets import find_shape

    if name is None:
        raise StrettoError(
            "--format dcp needs --model: torch.distributed.checkpoint keeps tensors, not what they compute",
            hint="--model llama3.1-8b, or the model's config.json, or a config.yaml with its section `model`",
        )
    path = Path(name)
    return load(path).shape() if path.suffix in (".yaml", ".yml") else find_shape(name)


def _print_import(console: Console, source: Path, made: Imported) -> None:
    from stretto.engine.checkpoint.files import size_text

    said = [
        f"{source}: {made.shape.family}, {made.parameters / 1e6:,.4g} M parameters, {size_text(made.bytes)} "
        f"in {made.dtype}",
        f"  {made.checkpoint}  the checkpoint",
        f"  {made.config}  the model, and what trains on from there",
        *([] if made.tokenizer is None else [f"  {made.tokenizer}"]),
        *(f"note: {note}" for note in made.notes),
        f"next:\n  {made.next}",
    ]
    console.print(*said, sep="\n", markup=False, highlight=False, soft_wrap=True)


def _named(path: Path) -> list[Path]:
    """The checkpoints at a path, newest first."""
    from stretto.engine.checkpoint.folder import checkpoints, is_checkpoint, resolve, step_of

    if is_checkpoint(path) or (path.is_dir() and step_of(path) is not None):
        return [path]
    if named := checkpoints(resolve(path)):
        return named
    raise StrettoError(
        f"no checkpoint at {path}", hint="name a run folder, its checkpoints folder, or one checkpoint"
    )


def _newest(path: Path) -> Path:
    """The newest checkpoint that is intact; damaged ones before it are reported."""
    from stretto.engine.checkpoint.manifest import problems

    named = _named(path)
    for one in named:
        if not (wrong := problems(one)):
            return one
        if len(named) > 1:
            typer.echo(f"checkpoint {one} is damaged: {wrong[0]}", err=True)
    raise StrettoError(f"no whole checkpoint at {path}", hint=f"see stretto checkpoint verify {path}")


def _facts(path: Path, look: Callable[[Path], list[str]]) -> dict[str, Any]:
    from stretto.engine.checkpoint.files import DamageError
    from stretto.engine.checkpoint.folder import step_of
    from stretto.engine.checkpoint.manifest import load_manifest

    wrong = look(path)
    facts: dict[str, Any] = {"path": str(path), "step": step_of(path), "ok": not wrong, "problems": wrong}
    try:
        manifest = load_manifest(path)
    except (DamageError, OSError):
        return facts
    return facts | {
        "step": manifest.step,
        "bytes": manifest.bytes,
        "world": manifest.world,
        "tensors": manifest.tensors,
        "dtypes": manifest.dtypes,
        "saved": manifest.saved,
        "stretto": manifest.stretto,
        "torch": manifest.torch,
        "meta": manifest.meta,
    }


def _show(described: list[dict[str, Any]], as_json: bool) -> None:
    def table(console: Console) -> None:
        from rich.table import Table

        from stretto.engine.checkpoint.files import size_text
        from stretto.engine.checkpoint.folder import HELD_OUT_LOSS

        losses = [
            loss
            for one in described
            if one["ok"] and isinstance(loss := one.get("meta", {}).get(HELD_OUT_LOSS), float)
        ]
        rows = Table(box=None)
        for title in ("step", "size", "ranks", "saved", "state"):
            rows.add_column(title, justify="right" if title in ("step", "size", "ranks") else "left")
        for one in described:
            size = size_text(one["bytes"]) if "bytes" in one else "?"
            state = "whole" if one["ok"] else "damaged"
            if one["ok"] and losses and one["meta"].get(HELD_OUT_LOSS) == min(losses):
                state = f"whole, least held-out loss: {min(losses):.4f}"
            cells = (one["step"], size, one.get("world", "?"), one.get("saved", "?"), state)
            rows.add_row(*(str(cell) for cell in cells))
        console.print(rows)
        for one in described:
            for problem in one["problems"]:
                console.print(f"{one['path']}: {problem}", markup=False, soft_wrap=True)

    report({"checkpoints": described, "ok": all(one["ok"] for one in described)}, as_json, table)
