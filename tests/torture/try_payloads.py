"""For a process of its own: readers are given hostile files; prints a line of JSON for each.

python try_payloads.py FOLDER [EVERY]

A payload counts as executed where Python's audit events show a process, an import by an unpickler or code
from one of its files, or where the canary is there; as a read outside where a file of the folder `outside` is
opened. Every EVERYth is tried.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import payloads
from parsers import PARSERS

from stretto.engine.parallel.control import CollectiveError
from stretto.errors import StrettoError
from stretto.run.data import template_renderer

RUNS = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "subprocess.Popen")
RUNS += ("pickle.find_class", "socket.connect", "webbrowser.open", "urllib.Request")
Try = tuple[str, Callable[[], object]]
seen = list[str]()


def audit(outside: str, inside: str) -> Callable[[str, tuple[Any, ...]], None]:
    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if not armed:
            return
        if event in RUNS and not renders_templates(event, arguments):
            seen.append(f"ran: {event} {str(arguments)[:80]}")
        elif event == "exec" and str(getattr(arguments[0], "co_filename", "")).startswith(inside):
            seen.append(f"ran: code of {arguments[0].co_filename}")
        elif event == "open" and isinstance(arguments[0], str | bytes):
            real = os.path.realpath(os.fsdecode(arguments[0]))
            if real.startswith(outside) or real in ("/dev/zero", "/proc/self/mem"):
                seen.append(f"read outside: {real}")

    return hook


armed = False


def renders_templates(event: str, arguments: tuple[Any, ...]) -> bool:
    """Whether what starts is the process that renders chat templates, which opens and runs nothing itself."""
    return event == "subprocess.Popen" and arguments[1][1:3] == ["-I", template_renderer.__file__]


def tries(folder: Path, canary: Path, secret: Path) -> Iterator[Try]:
    """Every payload, by name."""
    import torch

    from stretto.engine.checkpoint.load import verify
    from stretto.engine.checkpoint.read import read_whole
    from stretto.engine.checkpoint.save import save
    from stretto.engine.parallel.fragment import ShardPlacement
    from stretto.job.presets import preset
    from stretto.run.data.chat_template import ChatTemplate
    from stretto.run.diagnose.dump import read_dumps
    from stretto.run.train.metrics import read_lines

    wrapped, tags = payloads.pickles(canary), payloads.tagged(canary, secret)
    for name, entry in PARSERS.items():
        place = folder / "parsers" / name
        place.mkdir(parents=True)
        parser = entry(place)
        for kind, data in {**wrapped, **(tags if parser.file.endswith("yaml") else {})}.items():
            yield f"{name}: {kind}", partial(_read, parser.read, place / parser.file, data)
    placement = ShardPlacement.unsharded("model.a", (4, 4))
    saved = save(
        folder=folder / "valid",
        step=1,
        tensors={"model.a": (torch.ones(4, 4), placement)},
        meta={"step": 1, "samples": 1},
        per_rank=None,
        keep=None,
    )
    read_whole(saved)
    for name, path in payloads.forged(folder / "forged", saved, secret, wrapped):
        yield f"checkpoint: {name}", partial(_check_and_read, verify, read_whole, path)
    yield from _imports(folder, canary, secret, wrapped, preset("llama3-8b"))
    for kind, data in wrapped.items():
        yield (
            f"metrics: {kind}",
            partial(_read, lambda p: list(read_lines(p)), folder / "metrics.jsonl", data),
        )
        dumps = folder / "dumps" / kind.replace(" ", "-")
        dumps.mkdir(parents=True)
        (dumps / "nccl_trace_rank_0").write_bytes(data)
        yield f"dump: {kind}", partial(read_dumps, dumps)
    for at, text in enumerate(payloads.TEMPLATES):
        source = text.replace("CANARY", str(canary)).replace("SECRET", str(secret))
        template = ChatTemplate(source=source)
        yield f"template {at}", partial(template.render, [{"role": "user", "content": "hi"}])


def _imports(
    folder: Path, canary: Path, secret: Path, wrapped: dict[str, bytes], shape: Any
) -> Iterator[Try]:
    from stretto.run.train.imported import import_model
    from stretto_interop.checkpoints.megatron.common import read_common
    from stretto_interop.commands.checkpoint import import_dcp

    for name, path in payloads.published(folder / "published", canary, secret, wrapped):
        yield f"Hugging Face: {name}", partial(import_model, path, folder / "out" / path.name)
    for kind, data in wrapped.items():
        place = folder / "dcp" / kind.replace(" ", "-")
        place.mkdir(parents=True)
        (place / ".metadata").write_bytes(data)
        yield (
            f"distributed checkpoint: {kind}",
            partial(import_dcp, place, folder / "out" / f"dcp-{place.name}", shape, states=False),
        )
        place = folder / "megatron" / kind.replace(" ", "-")
        place.mkdir(parents=True)
        (place / "common.pt").write_bytes(data)
        yield f"Megatron: {kind}", partial(read_common, place)


def _read(read: Callable[[Path], object], path: Path, data: bytes) -> object:
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    return read(path)


def _check_and_read(
    verify: Callable[[Path], list[str]], read: Callable[[Path], object], path: Path
) -> object:
    if wrong := verify(path):
        raise StrettoError("; ".join(wrong))
    return read(path)


def outcome(attempt: Callable[[], object], secret: str) -> str:
    """What came of one payload."""
    try:
        result = attempt()
    except (StrettoError, CollectiveError) as error:
        return "told the secret" if secret in str(error) else "refused"
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return "told the secret" if secret in repr(result) else "accepted"


def main() -> None:
    global armed
    folder, every = Path(sys.argv[1]).resolve(), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    outside, inside = folder / "outside", folder / "inside"
    outside.mkdir()
    inside.mkdir()
    canary, secret = outside / "canary", outside / "secret.json"
    content = "the secret 7f3a9c"
    secret.write_text(json.dumps({"weight_map": {}, "note": content}))
    before = sorted(p.name for p in folder.iterdir())
    warnings.simplefilter("ignore")
    sys.addaudithook(audit(str(outside), str(inside)))
    for number, (name, attempt) in enumerate(tries(inside, canary, secret)):
        if number % every:
            continue
        seen.clear()
        armed = True
        verdict = outcome(attempt, content)
        armed = False
        if canary.exists():
            seen.append("ran: the canary is there")
            canary.unlink()
        if sorted(p.name for p in folder.iterdir()) != before or len(list(outside.iterdir())) != 1:
            seen.append("wrote outside")
        print(json.dumps({"payload": name, "came": verdict, "seen": list(seen)}), flush=True)


main()
