"""The cells of one row of a table of runs: by one name each, read strictly, with every default told."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from stretto.errors import StrettoError, nearest

Value = TypeVar("Value")

# names by which tables, frameworks and command lines call the same thing
ALIASES: Mapping[str, tuple[str, ...]] = {
    "source": ("reference", "origin"),
    "model": ("model_name", "name"),
    "params_b": ("params", "parameters_b", "size_b", "billions"),
    "layers": ("num_layers", "n_layers", "nlayers"),
    "hidden": ("hidden_size", "d_model", "dim"),
    "heads": ("attention_heads", "num_heads", "n_heads", "num_attention_heads"),
    "kv_heads": ("num_query_groups", "n_kv_heads", "num_key_value_heads", "query_groups"),
    "head_dim": ("kv_channels",),
    "ffn": ("ffn_hidden_size", "intermediate_size"),
    "seq": ("sequence", "seq_len", "seqlen", "sequence_length", "seq_length", "context_length"),
    "vocab": ("vocab_size",),
    "gpu": ("gpu_type", "device", "accelerator", "hardware", "cluster"),
    "gpus": ("num_gpus", "n_gpus", "gpu_count", "#gpus", "world", "world_size", "devices"),
    "node_size": ("node", "gpus_per_node", "devices_per_node"),
    "dp": ("data_parallel",),
    "tp": ("tensor_parallel",),
    "pp": ("pipeline_parallel",),
    "vp": ("vpp", "chunks", "virtual_pipeline", "interleave", "virtual_stages"),
    "cp": ("context_parallel",),
    "ep": ("expert_parallel",),
    "expert_tp": ("etp", "expert_tensor_parallel"),
    "sp": ("sequence_parallel",),
    "zero": ("zero_stage", "mode", "fsdp"),
    "shard": ("group_size", "shard_group", "shard_size", "hsdp_shard"),
    "recompute": ("recomputation", "activation_checkpointing", "activation_recompute", "ac"),
    "micro_batch": ("micro", "mbs", "micro_batch_size", "local_batch", "local_batch_size", "micro_size"),
    "global_batch": ("batch", "gbs", "global_batch_size", "global_size"),
    "precision": ("dtype", "data_type"),
    "schedule": ("pipeline_schedule", "pp_schedule"),
    "group": ("interleave_group", "microbatch_group"),
    "attention": ("attn", "attention_kernel"),
    "context": ("cp_kind", "cp_type", "context_parallel_kind"),
    "offload": ("optimizer_offload", "cpu_offload"),
    "optimiser": ("optimizer",),
    "experts": ("num_experts", "n_experts"),
    "top_k": ("topk", "moe_topk", "experts_per_token"),
    "iter_time_s": ("step_time_s", "iteration_time_s", "step_s", "seconds_per_step"),
    "tflops_per_gpu": ("tflops", "model_tflops_per_gpu", "tflops_gpu"),
    "mfu_pct": ("mfu_percent",),
    "hfu_pct": ("hfu_percent",),
    "tokens_per_s_per_gpu": ("tokens_per_sec_per_gpu", "tps", "tokens_s_gpu", "tps_per_gpu", "wps"),
    "peak_mem_gib": ("peak_memory_gib", "memory_gib", "peak_mem_gb", "memory"),
    "notes": ("note", "comment", "comments", "remarks"),
}
_LARGEST = 2**24  # of a whole number: a row beyond is a slip
_NAMES = {alias: name for name, aliases in ALIASES.items() for alias in (name, *aliases)}
_MISSING = {"", "-", "--", "?", "n/a", "na", "nan", "none given", "unknown", "null", "not stated"}


def canonical(name: str) -> str | None:
    """The name that this project's tables use for a column, whatever its case and spaces; None: no such."""
    plain = re.sub(r"[\s\-]+", "_", name.strip().lower())
    return _NAMES.get(plain)


def word_name(word: str) -> str:
    """The name of a word of a command line, "micro" for micro_batch.

    Raises:
        StrettoError: no such word; names the nearest.
    """
    found = canonical(word)
    if found is None:
        near = nearest(word.lower(), _NAMES)
        raise StrettoError(
            f"{word!r} is no field of a layout", hint=f"did you mean {near!r}?" if near else _usual()
        )
    return found


def _usual() -> str:
    return "as in tp=8 pp=4 micro=1 batch=512 schedule=interleaved chunks=5 recompute=selective zero=1"


class Cells:
    """The cells of one row.

    Attributes:
        taken: every default that was taken instead of an empty cell, and every value that was read
            otherwise than it stands there: name to what was taken.
    """

    def __init__(self, cells: Mapping[str, str | None]) -> None:
        self._cells = dict[str, str]()
        for name, value in cells.items():
            known = canonical(name)
            if known is not None and value is not None and value.strip().lower() not in _MISSING:
                self._cells.setdefault(known, value.strip())
        self.taken = dict[str, str]()

    def text(self, name: str) -> str | None:
        """What stands there; None: nothing."""
        return self._cells.get(name)

    def words(self, name: str) -> str:
        """What stands there in small letters; "" where nothing does."""
        return self._cells.get(name, "").lower()

    def number(self, name: str) -> float | None:
        """A number above 0, also as "1,024", "8.0", "1e6" or "64K".

        Raises:
            StrettoError: it is none.
        """
        given = self.text(name)
        if given is None:
            return None
        match = re.fullmatch(r"([-+]?[\d.]+(?:e[-+]?\d+)?)\s*(k?)", given.replace(",", "").lower())
        try:
            value = float(match[1]) * (1024 if match[2] else 1) if match else None
        except ValueError:
            value = None
        if value is None or not 0 <= value < float("inf"):
            raise StrettoError(f"{name} is {given!r}, which is no number", hint=f"{name} is a number above 0")
        return value or None

    def whole(self, name: str) -> int | None:
        """A whole number above 0.

        Raises:
            StrettoError: it is none.
        """
        value = self.number(name)
        if value is None:
            return None
        if value > _LARGEST:
            raise StrettoError(f"{name} is {self.text(name)}", hint=f"at most {_LARGEST:,}")
        if value != int(value):
            raise StrettoError(
                f"{name} is {self.text(name)}, which is no whole number",
                hint=f"nearest: {name}={round(value)}",
            )
        return int(value)

    def flag(self, name: str) -> bool | None:
        """Whether it is switched on; None: not told."""
        given = self.text(name)
        return None if given is None else given.lower() not in ("0", "0.0", "no", "n", "false", "off", "none")

    def take(self, name: str, value: Value, why: str = "") -> Value:
        """`value` instead of what stands there, told."""
        self.taken[name] = f"{value} ({why})" if why else str(value)
        return value

    @property
    def told(self) -> str:
        """All defaults on one line."""
        return "; ".join(f"{name}={value}" for name, value in self.taken.items())


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file with a line of names, each by its own column names.

    Raises:
        StrettoError: the file cannot be read, is empty, or has no column that a run has.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(_rows(csv.DictReader(file)))
    except OSError as error:
        raise StrettoError(f"cannot read {path}: {error.strerror}", hint="check the file's name") from None
    except (UnicodeDecodeError, csv.Error):
        raise StrettoError(f"cannot read {path}: it is no CSV in UTF-8", hint="save it as CSV") from None
    if not rows:
        raise StrettoError(f"{path} has no rows", hint="a line of column names, then one line a run")
    if "gpus" not in {canonical(name) for name in rows[0]}:
        raise StrettoError(
            f"{path} has no column gpus", hint="columns are such as model, gpu, gpus, tp, pp, global_batch"
        )
    return rows


def _rows(reader: csv.DictReader[str]) -> Iterator[dict[str, str]]:
    for row in reader:
        # cells beyond the names, and names without cells, are none of anybody's
        yield {str(name): str(value or "") for name, value in row.items() if name}
