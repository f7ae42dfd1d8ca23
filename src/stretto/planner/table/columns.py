"""The columns of a table of runs: one description for the reader, its errors and the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from stretto.errors import StrettoError, nearest
from stretto.planner.assumptions import software_profiles
from stretto.planner.machines.catalogue import clusters
from stretto.program import names as schedules
from stretto.spec.framework import OPERATORS
from stretto.spec.shape import FAMILIES

Kind = Literal["whole", "number", "share", "flag", "choice", "choices", "text"]
Value = int | float | bool | str
USER_PREFIX = "x_"  # of the names of columns that a user adds; they are kept and not read
_LARGEST = 2**24  # whole numbers above it are taken for mistakes
_FLAGS = {"0": False, "1": True, "false": False, "true": True}
_ALLOWED: Mapping[Kind, str] = {
    "whole": "a whole number above 0",
    "number": "a number above 0",
    "share": "a number from 0 to below 1",
    "flag": "0 or 1",
    "text": "any text",
}


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of a table, and one word of `stretto predict`.

    Attributes:
        default: what an empty cell means, in words.
        meaning: with the unit.
        aliases: other names of the column.
        choices: the values of a `choice`, and of each word of `choices`.
    """

    name: str
    kind: Kind
    default: str
    meaning: str
    aliases: Sequence[str] = ()
    choices: Sequence[str] = ()

    @property
    def allowed(self) -> str:
        """The values of a cell, in words."""
        words = ", ".join(self.choices)
        return {"choice": words, "choices": f"{words}; several with +"}.get(self.kind) or _ALLOWED[self.kind]

    def read(self, cell: str) -> Value:
        """The value of a non-empty cell.

        Raises:
            StrettoError: the value is not allowed.
        """
        value = cell if self.kind == "text" else self._value(cell.lower().removesuffix(".0"))
        if value is None:
            near = nearest(cell.lower(), self.choices)
            raise StrettoError(
                f"{self.name} is {cell!r}, allowed: {self.allowed}",
                hint=f"did you mean {near!r}?" if near else f"{self.name}: {self.meaning}",
            )
        return value

    def _value(self, word: str) -> Value | None:
        if self.kind == "flag":
            return _FLAGS.get(word)
        if self.kind == "choice":
            return next((choice for choice in self.choices if choice.lower() == word), None)
        if self.kind == "choices":
            words = word.replace("+", " ").replace(",", " ").split()
            return "+".join(words) if words and all(one in self.choices for one in words) else None
        try:
            number = float(word)
        except ValueError:
            return None
        if self.kind == "whole":
            return int(number) if 1 <= number <= _LARGEST and number == int(number) else None
        legal = 0 < number < float("inf") if self.kind == "number" else 0 <= number < 1
        return number if legal else None


def _column(
    kind: Kind, name: str, meaning: str, default: str = "", aliases: str = "", *, choices: Sequence[str] = ()
) -> Column:
    """A column, with its aliases in one text."""
    return Column(
        name=name, kind=kind, default=default, meaning=meaning, aliases=aliases.split(), choices=choices
    )


_NETWORKS = sorted({cluster.outer.kind for cluster in clusters()})
_PROFILE = (
    "kernels and host: unfused (Megatron to 2022), eager (PyTorch to 2022), fused (FlashAttention 1), "
    "today (PyTorch, FlashAttention 2), compiled (torch.compile), engine (Transformer Engine of 2023 and "
    "2024), tuned (FlashAttention 3, cuDNN, Transformer Engine since)"
)
_AGE = "today; unfused with unfused attention"
_KERNEL = "kernel of attention: FlashAttention's kind, or one that stores the scores"
_FLASH = "fused; unfused on devices without bf16"
_SCHEDULE = "1f1b; interleaved with chunks > 1"
_SMALL = "a replica's batch up to 16,384 tokens without a pipeline, else 1"
_COUNT = "from the batches, else pp x chunks"
_DEVICE = "bf16; fp16 on devices without it"
_TYPES = ("bf16", "fp16", "fp8", "fp32")
_SUMS = "type in which gradients are accumulated; same: the weights'"
_AGAIN = "what the backward recomputes: the attention core, or whole blocks"
_PARTS = "what selective recomputation repeats: Megatron-Core's modules; alternate_mm: torchtitan's op"
_MODULES = "recompute_modules"
_INPUTS = "where the inputs of recomputed blocks are kept: cpu is DeepSpeed's cpu_checkpointing"
_WHOSE = "whose ways of keeping weights, gradients and activations; fsdp: also torchtitan's, llm-foundry's"
_USUALLY = "megatron; fsdp with zero = 3"
_ZERO = "1 where copies > 1; more where states would not fit"
_SHARED = "what is sharded over copies: 0 nothing, 1 states, 2 also gradients, 3 also parameters"
_FLOPS = "what tflops_per_gpu counts; hardware FLOPs include recomputation"
_KINDS = ("allocated", "reserved", "device")

SECTIONS: Mapping[str, Sequence[Column]] = {
    "model": (
        _column(
            "text", "model", "a published model, its config.json, or a label if sizes are listed", "the sizes"
        ),
        _column("choice", "family", "blocks of GPT-2 or Llama", "the model's, else gpt", choices=FAMILIES),
        _column("whole", "layers", "transformer blocks", "the model's", "num_layers"),
        _column("whole", "hidden", "width of the residual stream", "the model's", "hidden_size d_model"),
        _column("whole", "heads", "query heads", "the model's", "num_heads"),
        _column("whole", "kv_heads", "key and value heads", "the model's, else heads", "num_query_groups"),
        _column("whole", "head_dim", "width of a head", "the model's, else hidden / heads", "kv_channels"),
        _column("whole", "ffn", "inner width of a dense MLP", "the model's, else the family's", "ffn_size"),
        _column("whole", "vocab", "entries of the tokenizer", "the model's, else 50257", "vocab_size"),
        _column("share", "dropout", "dropout probability, gpt only", "the model's, else 0"),
        _column("whole", "experts", "routed experts per block", "the model's, else none", "num_experts"),
        _column("whole", "top_k", "routed experts per token", "the model's, else 2", "topk"),
        _column("whole", "expert_ffn", "inner width of a routed expert", "the model's, else ffn", "moe_ffn"),
    ),
    "machine": (
        _column("text", "gpu", "a name of `stretto catalogue`, or a cluster's YAML", "required", "device"),
        _column("whole", "gpus", "devices of the run", "tp x cp x dp x pp", "num_gpus world_size"),
        _column("whole", "node_size", "devices per node", "the cluster's", "gpus_per_node"),
        _column("choice", "network", "kind of link between nodes", "the cluster's", choices=_NETWORKS),
        _column("number", "network_gbs", "GB/s of that link per device, in one direction", "the cluster's"),
    ),
    "layout": (
        _column("whole", "tp", "tensor-parallel ranks", "1"),
        _column("whole", "cp", "context-parallel ranks", "1"),
        _column("whole", "pp", "pipeline-parallel ranks", "1"),
        _column("whole", "dp", "data-parallel ranks", "gpus / (tp x cp x pp)"),
        _column("whole", "ep", "expert-parallel ranks, out of tp x cp x dp", "1"),
        _column("whole", "expert_tp", "ranks that split an expert", "1 with ep > 1, else tp", "etp"),
        _column("flag", "sp", "sequence parallelism over the tp ranks", "1 with tp > 1", "sequence_parallel"),
        _column("choice", "context", "kind of context parallelism", "ring", choices=("ring", "ulysses")),
        _column("choice", "schedule", "pipeline schedule", _SCHEDULE, choices=tuple(schedules())),
        _column("whole", "chunks", "stages per pipeline rank", "the schedule's", "vp vpp"),
        _column("whole", "group", "consecutive microbatches per chunk", "the schedule's"),
        _column(
            "whole", "waves", "number of times that the stages go down and up the ranks", "the schedule's"
        ),
    ),
    "batch": (
        _column("whole", "seq", "tokens per sample", "the model's, else 2048", "seq_len sequence"),
        _column("whole", "micro_batch", "samples per microbatch", _SMALL, "micro mbs"),
        _column("whole", "microbatches", "microbatches per replica and step", _COUNT),
        _column("whole", "global_batch", "samples per step", "from the microbatches", "batch gbs"),
    ),
    "memory": (
        _column("choice", "zero", _SHARED, _ZERO, "zero_stage", choices="0123"),
        _column("whole", "shard", "ranks over which zero shards", "all copies", "shard_size"),
        _column("choice", "offload", "where optimizer states are kept", "none", choices=("none", "cpu")),
        _column(
            "choice",
            "offload_parameters",
            "where the shards of zero 3 are kept",
            "none",
            choices=("none", "cpu"),
        ),
        _column("choice", "recompute", _AGAIN, "none", "ac", choices=("none", "selective", "full")),
        _column("choices", "recompute_operators", _PARTS, "core_attn", _MODULES, choices=OPERATORS),
        _column("flag", "shard_inputs", "inputs of recomputed blocks are split over tp", "0"),
        _column("choice", "offload_inputs", _INPUTS, "none", choices=("none", "cpu")),
        _column("choice", "precision", "type of matrix products", _DEVICE, "dtype", choices=_TYPES),
        _column("choice", "gradients", _SUMS, "fp32", choices=("fp32", "same")),
    ),
    "software": (
        _column("choice", "attention", _KERNEL, _FLASH, "attn", choices=("fused", "unfused")),
        _column("choice", "software", _PROFILE, _AGE, choices=tuple(software_profiles())),
        _column("choice", "framework", _WHOSE, _USUALLY, choices=("megatron", "deepspeed", "fsdp")),
        _column("flag", "fused_loss", "the loss keeps logits in 16 bits only", "0"),
        _column("flag", "overlap", "data-parallel collectives overlap with computation", "1"),
        _column("flag", "blocking", "a pipeline rank waits until what it sends has arrived", "0"),
    ),
    "measured": (
        _column("number", "iter_time_s", "seconds per step", "", "step_time_s"),
        _column("number", "tokens_per_s_per_gpu", "tokens per second and device", "", "tps"),
        _column("number", "tflops_per_gpu", "TFLOP/s per device, attention in full", "", "tflops"),
        _column("choice", "flops_count", _FLOPS, "model", choices=("model", "hardware")),
        _column("number", "mfu_pct", "model FLOPs utilization, % of the peak"),
        _column("number", "hfu_pct", "hardware FLOPs utilization, including recomputation, % of the peak"),
        _column("number", "peak_mem_gib", "GiB of the fullest device", "", "memory_gib"),
        _column("choice", "memory_count", "what peak_mem_gib counts", "allocated", choices=_KINDS),
        _column("flag", "oom", "the run failed for lack of memory", "0"),
    ),
    "kept and not read": (
        _column("text", "source", "source of the row"),
        _column("text", "params_b", "parameters in 1e9"),
        _column("text", "notes", "remarks"),
    ),
}
COLUMNS = {column.name: column for section in SECTIONS.values() for column in section}
_NAMES = {name: column for column in COLUMNS.values() for name in (column.name, *column.aliases)}


def column(name: str) -> Column:
    """The column of a name or alias, in any case.

    Raises:
        StrettoError: there is none; names the nearest.
    """
    known = _NAMES.get(name.strip().lower())
    if known is None:
        near = nearest(name.lower(), _NAMES)
        where = f"`stretto predict --table-columns` lists all, your own start with {USER_PREFIX}"
        raise StrettoError(
            f"there is no column {name!r}", hint=f"did you mean {near!r}? {where}" if near else where
        )
    return known


T = TypeVar("T", bound=Value)


class Cells:
    """The values of one row by the columns' names.

    Attributes:
        defaults: the defaults taken for empty cells: name to value, and why.

    Raises:
        StrettoError: an unknown column, a column under two names, or a value that is not allowed.
    """

    def __init__(self, cells: Mapping[str, str]) -> None:
        self._values = dict[str, Value]()
        self.defaults = dict[str, str]()
        for name, cell in cells.items():
            if name.startswith(USER_PREFIX) or not cell.strip():
                continue
            known = column(name)
            if known.name in self._values:
                raise StrettoError(f"{known.name} is there under two names", hint=f"leave {name} out")
            self._values[known.name] = known.read(cell.strip())

    def get(self, name: str, kind: type[T]) -> T | None:
        """The value of a cell; None: it is empty."""
        value = self._values.get(COLUMNS[name].name)
        assert value is None or isinstance(value, kind)
        return value

    def whole(self, name: str) -> int | None:
        """A whole number."""
        return self.get(name, int)

    def number(self, name: str) -> float | None:
        """A number."""
        return self.get(name, float)

    def word(self, name: str) -> str | None:
        """A choice or a text."""
        return self.get(name, str)

    def flag(self, name: str) -> bool:
        """Whether it is switched on; an empty cell is off."""
        return bool(self.get(name, bool))

    def value_or(self, name: str, default: T, why: str = "") -> T:
        """The value of a cell, or the default, which is recorded."""
        value = self.get(name, type(default))
        if value is not None:
            return value
        shown = int(default) if isinstance(default, bool) else default
        self.defaults[name] = f"{shown} ({why})" if why else str(shown)
        return default


def reference() -> str:
    """All columns in Markdown, as `stretto predict --table-columns` prints them."""
    lines = ["| column | also | meaning | allowed | where empty |", "|---|---|---|---|---|"]
    for title, section in SECTIONS.items():
        lines.append(f"| *{title}* | | | | |")
        for one in section:
            cells = (f"`{one.name}`", ", ".join(one.aliases), one.meaning, one.allowed, one.default)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
