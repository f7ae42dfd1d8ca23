"""The columns of a table of runs: one description for the reader, its errors and the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from stretto.errors import StrettoError, nearest
from stretto.planner.assumptions import software_profiles
from stretto.planner.machines.catalogue import clusters
from stretto.program import names as schedules
from stretto.spec.shape import FAMILIES

Kind = Literal["whole", "number", "share", "flag", "choice", "text"]
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
        choices: the values of a `choice`.
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
        return ", ".join(self.choices) if self.kind == "choice" else _ALLOWED[self.kind]

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
        try:
            number = float(word)
        except ValueError:
            return None
        if self.kind == "whole":
            return int(number) if 1 <= number <= _LARGEST and number == int(number) else None
        legal = 0 < number < float("inf") if self.kind == "number" else 0 <= number < 1
        return number if legal else None


_NETWORKS = sorted({cluster.outer.kind for cluster in clusters()})
_PROFILE = (
    "kernels and host: unfused (to 2022), fused (FlashAttention 1), today (PyTorch, FlashAttention 2), "
    "compiled (torch.compile), tuned (FlashAttention 3, cuDNN, Transformer Engine)"
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
_ZERO = "1 where copies > 1; more where states would not fit"
_SHARED = "what is sharded over copies: 0 nothing, 1 states, 2 also gradients, 3 also parameters"
_FLOPS = "what tflops_per_gpu counts; hardware FLOPs include recomputation"
_KINDS = ("allocated", "reserved", "device")

SECTIONS: Mapping[str, Sequence[Column]] = {
    "model": (
        Column(
            name="model",
            kind="text",
            default="the sizes",
            meaning="a published model, its config.json, or a label if sizes are listed",
        ),
        Column(
            name="family",
            kind="choice",
            default="the model's, else gpt",
            meaning="blocks of GPT-2 or Llama",
            choices=FAMILIES,
        ),
        Column(
            name="layers",
            kind="whole",
            default="the model's",
            meaning="transformer blocks",
            aliases=["num_layers"],
        ),
        Column(
            name="hidden",
            kind="whole",
            default="the model's",
            meaning="width of the residual stream",
            aliases=["hidden_size", "d_model"],
        ),
        Column(
            name="heads", kind="whole", default="the model's", meaning="query heads", aliases=["num_heads"]
        ),
        Column(
            name="kv_heads",
            kind="whole",
            default="the model's, else heads",
            meaning="key and value heads",
            aliases=["num_query_groups"],
        ),
        Column(
            name="head_dim",
            kind="whole",
            default="the model's, else hidden / heads",
            meaning="width of a head",
            aliases=["kv_channels"],
        ),
        Column(
            name="ffn",
            kind="whole",
            default="the model's, else the family's",
            meaning="inner width of a dense MLP",
            aliases=["ffn_size"],
        ),
        Column(
            name="vocab",
            kind="whole",
            default="the model's, else 50257",
            meaning="entries of the tokenizer",
            aliases=["vocab_size"],
        ),
        Column(
            name="dropout",
            kind="share",
            default="the model's, else 0",
            meaning="dropout probability, gpt only",
        ),
        Column(
            name="experts",
            kind="whole",
            default="the model's, else none",
            meaning="routed experts per block",
            aliases=["num_experts"],
        ),
        Column(
            name="top_k",
            kind="whole",
            default="the model's, else 2",
            meaning="routed experts per token",
            aliases=["topk"],
        ),
        Column(
            name="expert_ffn",
            kind="whole",
            default="the model's, else ffn",
            meaning="inner width of a routed expert",
            aliases=["moe_ffn"],
        ),
    ),
    "machine": (
        Column(
            name="gpu",
            kind="text",
            default="required",
            meaning="a name of `stretto catalogue`, or a cluster's YAML",
            aliases=["device"],
        ),
        Column(
            name="gpus",
            kind="whole",
            default="tp x cp x dp x pp",
            meaning="devices of the run",
            aliases=["num_gpus", "world_size"],
        ),
        Column(
            name="node_size",
            kind="whole",
            default="the cluster's",
            meaning="devices per node",
            aliases=["gpus_per_node"],
        ),
        Column(
            name="network",
            kind="choice",
            default="the cluster's",
            meaning="kind of link between nodes",
            choices=_NETWORKS,
        ),
        Column(
            name="network_gbs",
            kind="number",
            default="the cluster's",
            meaning="GB/s of that link per device, in one direction",
        ),
    ),
    "layout": (
        Column(name="tp", kind="whole", default="1", meaning="tensor-parallel ranks"),
        Column(name="cp", kind="whole", default="1", meaning="context-parallel ranks"),
        Column(name="pp", kind="whole", default="1", meaning="pipeline-parallel ranks"),
        Column(name="dp", kind="whole", default="gpus / (tp x cp x pp)", meaning="data-parallel ranks"),
        Column(name="ep", kind="whole", default="1", meaning="expert-parallel ranks, out of tp x cp x dp"),
        Column(
            name="expert_tp",
            kind="whole",
            default="1 with ep > 1, else tp",
            meaning="ranks that split an expert",
            aliases=["etp"],
        ),
        Column(
            name="sp",
            kind="flag",
            default="1 with tp > 1",
            meaning="sequence parallelism over the tp ranks",
            aliases=["sequence_parallel"],
        ),
        Column(
            name="context",
            kind="choice",
            default="ring",
            meaning="kind of context parallelism",
            choices=("ring", "ulysses"),
        ),
        Column(
            name="schedule",
            kind="choice",
            default=_SCHEDULE,
            meaning="pipeline schedule",
            choices=tuple(schedules()),
        ),
        Column(
            name="chunks",
            kind="whole",
            default="the schedule's",
            meaning="stages per pipeline rank",
            aliases=["vp", "vpp"],
        ),
        Column(
            name="group",
            kind="whole",
            default="the schedule's",
            meaning="consecutive microbatches per chunk",
        ),
        Column(
            name="waves",
            kind="whole",
            default="the schedule's",
            meaning="number of times that the stages go down and up the ranks",
        ),
    ),
    "batch": (
        Column(
            name="seq",
            kind="whole",
            default="the model's, else 2048",
            meaning="tokens per sample",
            aliases=["seq_len", "sequence"],
        ),
        Column(
            name="micro_batch",
            kind="whole",
            default=_SMALL,
            meaning="samples per microbatch",
            aliases=["micro", "mbs"],
        ),
        Column(
            name="microbatches", kind="whole", default=_COUNT, meaning="microbatches per replica and step"
        ),
        Column(
            name="global_batch",
            kind="whole",
            default="from the microbatches",
            meaning="samples per step",
            aliases=["batch", "gbs"],
        ),
    ),
    "memory": (
        Column(
            name="zero", kind="choice", default=_ZERO, meaning=_SHARED, aliases=["zero_stage"], choices="0123"
        ),
        Column(
            name="shard",
            kind="whole",
            default="all copies",
            meaning="ranks over which zero shards",
            aliases=["shard_size"],
        ),
        Column(
            name="offload",
            kind="choice",
            default="none",
            meaning="where optimizer states are kept",
            choices=("none", "cpu"),
        ),
        Column(
            name="offload_parameters",
            kind="choice",
            default="none",
            meaning="where the shards of zero 3 are kept",
            choices=("none", "cpu"),
        ),
        Column(
            name="recompute",
            kind="choice",
            default="none",
            meaning=_AGAIN,
            aliases=["ac"],
            choices=("none", "selective", "full"),
        ),
        Column(
            name="shard_inputs",
            kind="flag",
            default="0",
            meaning="inputs of recomputed blocks are split over tp",
        ),
        Column(
            name="precision",
            kind="choice",
            default=_DEVICE,
            meaning="type of matrix products",
            aliases=["dtype"],
            choices=_TYPES,
        ),
        Column(name="gradients", kind="choice", default="fp32", meaning=_SUMS, choices=("fp32", "same")),
    ),
    "software": (
        Column(
            name="attention",
            kind="choice",
            default=_FLASH,
            meaning=_KERNEL,
            aliases=["attn"],
            choices=("fused", "unfused"),
        ),
        Column(
            name="software", kind="choice", default=_AGE, meaning=_PROFILE, choices=tuple(software_profiles())
        ),
        Column(name="fused_loss", kind="flag", default="0", meaning="the loss keeps logits in 16 bits only"),
        Column(
            name="overlap",
            kind="flag",
            default="1",
            meaning="data-parallel collectives overlap with computation",
        ),
        Column(
            name="blocking",
            kind="flag",
            default="0",
            meaning="a pipeline rank waits until what it sends has arrived",
        ),
    ),
    "measured": (
        Column(
            name="iter_time_s",
            kind="number",
            default="",
            meaning="seconds per step",
            aliases=["step_time_s"],
        ),
        Column(
            name="tokens_per_s_per_gpu",
            kind="number",
            default="",
            meaning="tokens per second and device",
            aliases=["tps"],
        ),
        Column(
            name="tflops_per_gpu",
            kind="number",
            default="",
            meaning="TFLOP/s per device, attention in full",
            aliases=["tflops"],
        ),
        Column(
            name="flops_count", kind="choice", default="model", meaning=_FLOPS, choices=("model", "hardware")
        ),
        Column(name="mfu_pct", kind="number", default="", meaning="model FLOPs utilization, % of the peak"),
        Column(
            name="hfu_pct",
            kind="number",
            default="",
            meaning="hardware FLOPs utilization, including recomputation, % of the peak",
        ),
        Column(
            name="peak_mem_gib",
            kind="number",
            default="",
            meaning="GiB of the fullest device",
            aliases=["memory_gib"],
        ),
        Column(
            name="memory_count",
            kind="choice",
            default="allocated",
            meaning="what peak_mem_gib counts",
            choices=_KINDS,
        ),
        Column(name="oom", kind="flag", default="0", meaning="the run failed for lack of memory"),
    ),
    "kept and not read": (
        Column(name="source", kind="text", default="", meaning="source of the row"),
        Column(name="params_b", kind="text", default="", meaning="parameters in 1e9"),
        Column(name="notes", kind="text", default="", meaning="remarks"),
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
