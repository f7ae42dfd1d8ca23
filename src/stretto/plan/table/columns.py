"""The columns of a table of runs: one description for the reader, its errors and the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from stretto.cost.machine.catalogue import clusters
from stretto.cost.shape import FAMILIES
from stretto.cost.time.habits import known_habits
from stretto.errors import StrettoError, nearest
from stretto.schedule import names as schedules

Kind = Literal["whole", "number", "share", "flag", "choice", "text"]
Value = int | float | bool | str
OWN = "x_"  # what the names of a user's own columns start with; they are kept and not read
_LARGEST = 2**24  # of a whole number: anything larger is a slip
_FLAGS = {"0": False, "1": True, "false": False, "true": True}
_ALLOWED: Mapping[Kind, str] = {
    "whole": "a whole number above 0",
    "number": "a number above 0",
    "share": "a number from 0 to below 1",
    "flag": "0 or 1",
    "text": "any text",
}


@dataclass(frozen=True)
class Column:
    """One column of a table, and one word of `stretto predict`.

    Attributes:
        default: what an empty cell means, in words.
        meaning: with the unit.
        aliases: other names of the column.
        choices: what a `choice` may be.
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
        """The value of a cell that is not empty.

        Raises:
            StrettoError: it is none of the allowed values.
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
_SUMS = "type in which gradients are summed; same: the weights'"
_AGAIN = "what the backward computes again: the attention core, or whole blocks"
_ZERO = "1 where copies > 1; more where states would not fit"
_SHARED = "what copies share: 0 nothing, 1 states, 2 gradients too, 3 parameters too"
_FLOPS = "what tflops_per_gpu counts; hardware FLOPs are with what is recomputed"
_KINDS = ("allocated", "reserved", "device")

SECTIONS: Mapping[str, Sequence[Column]] = {
    "model": (
        Column("model", "text", "the sizes", "a published model, its config.json, or a label beside sizes"),
        Column("family", "choice", "the model's, else gpt", "blocks of GPT-2 or Llama", choices=FAMILIES),
        Column("layers", "whole", "the model's", "transformer blocks", ["num_layers"]),
        Column("hidden", "whole", "the model's", "width of the residual stream", ["hidden_size", "d_model"]),
        Column("heads", "whole", "the model's", "query heads", ["num_heads"]),
        Column("kv_heads", "whole", "the model's, else heads", "key and value heads", ["num_query_groups"]),
        Column("head_dim", "whole", "the model's, else hidden / heads", "width of a head", ["kv_channels"]),
        Column("ffn", "whole", "the model's, else the family's", "inner width of a dense MLP", ["ffn_size"]),
        Column("vocab", "whole", "the model's, else 50257", "entries of the tokenizer", ["vocab_size"]),
        Column("dropout", "share", "the model's, else 0", "probability, of a gpt"),
        Column("experts", "whole", "the model's, else none", "routed experts of a block", ["num_experts"]),
        Column("top_k", "whole", "the model's, else 2", "routed experts of a token", ["topk"]),
        Column("expert_ffn", "whole", "the model's, else ffn", "inner width of a routed expert", ["moe_ffn"]),
    ),
    "machine": (
        Column("gpu", "text", "required", "a name of `stretto catalogue`, or a cluster's YAML", ["device"]),
        Column("gpus", "whole", "tp x cp x dp x pp", "devices of the run", ["num_gpus", "world_size"]),
        Column("node_size", "whole", "the cluster's", "devices of a node", ["gpus_per_node"]),
        Column("network", "choice", "the cluster's", "kind of link between nodes", choices=_NETWORKS),
        Column("network_gbs", "number", "the cluster's", "GB/s of that link, a device, in one direction"),
    ),
    "layout": (
        Column("tp", "whole", "1", "tensor-parallel ranks"),
        Column("cp", "whole", "1", "context-parallel ranks"),
        Column("pp", "whole", "1", "pipeline-parallel ranks"),
        Column("dp", "whole", "gpus / (tp x cp x pp)", "data-parallel ranks"),
        Column("ep", "whole", "1", "expert-parallel ranks, out of tp x cp x dp"),
        Column("expert_tp", "whole", "1 with ep > 1, else tp", "ranks that split an expert", ["etp"]),
        Column("sp", "flag", "1 with tp > 1", "sequence parallelism beside tp", ["sequence_parallel"]),
        Column("context", "choice", "ring", "kind of context parallelism", choices=("ring", "ulysses")),
        Column("schedule", "choice", _SCHEDULE, "pipeline schedule", choices=tuple(schedules())),
        Column("chunks", "whole", "the schedule's", "stages of a pipeline rank", ["vp", "vpp"]),
        Column("group", "whole", "the schedule's", "microbatches that pass a chunk in a row"),
        Column("waves", "whole", "the schedule's", "times that the stages go down and up"),
    ),
    "batch": (
        Column("seq", "whole", "the model's, else 2048", "tokens of a sample", ["seq_len", "sequence"]),
        Column("micro_batch", "whole", _SMALL, "samples of a microbatch", ["micro", "mbs"]),
        Column("microbatches", "whole", _COUNT, "microbatches of a replica in a step"),
        Column("global_batch", "whole", "from the microbatches", "samples of a step", ["batch", "gbs"]),
    ),
    "memory": (
        Column("zero", "choice", _ZERO, _SHARED, ["zero_stage"], choices="0123"),
        Column("shard", "whole", "all copies", "ranks over which that is shared", ["shard_size"]),
        Column("offload", "choice", "none", "where optimizer states are", choices=("none", "cpu")),
        Column("offload_parameters", "choice", "none", "where zero 3 has shards", choices=("none", "cpu")),
        Column("recompute", "choice", "none", _AGAIN, ["ac"], ("none", "selective", "full")),
        Column("shard_inputs", "flag", "0", "inputs of recomputed blocks are split over tp"),
        Column("precision", "choice", _DEVICE, "type of products", ["dtype"], _TYPES),
        Column("gradients", "choice", "fp32", _SUMS, choices=("fp32", "same")),
    ),
    "software": (
        Column("attention", "choice", _FLASH, _KERNEL, ["attn"], ("fused", "unfused")),
        Column("software", "choice", _AGE, _PROFILE, choices=tuple(known_habits())),
        Column("fused_loss", "flag", "0", "the loss keeps logits in 16 bits only"),
        Column("overlap", "flag", "1", "data-parallel collectives run beside the computation"),
        Column("blocking", "flag", "0", "a pipeline rank waits until what it sends has arrived"),
    ),
    "measured": (
        Column("iter_time_s", "number", "", "seconds of a step", ["step_time_s"]),
        Column("tokens_per_s_per_gpu", "number", "", "tokens a second and device", ["tps"]),
        Column("tflops_per_gpu", "number", "", "TFLOP/s of a device, attention in full", ["tflops"]),
        Column("flops_count", "choice", "model", _FLOPS, choices=("model", "hardware")),
        Column("mfu_pct", "number", "", "model FLOPs utilization, % of the peak"),
        Column("hfu_pct", "number", "", "hardware FLOPs utilization, with what is recomputed, % of the peak"),
        Column("peak_mem_gib", "number", "", "GiB of the fullest device", ["memory_gib"]),
        Column("memory_count", "choice", "allocated", "what peak_mem_gib counts", choices=_KINDS),
        Column("oom", "flag", "0", "the run failed for lack of memory"),
    ),
    "kept and not read": (
        Column("source", "text", "", "where the row is from"),
        Column("params_b", "text", "", "parameters in 1e9"),
        Column("notes", "text", "", "remarks"),
    ),
}
COLUMNS = {column.name: column for section in SECTIONS.values() for column in section}
_NAMES = {name: column for column in COLUMNS.values() for name in (column.name, *column.aliases)}


def column(name: str) -> Column:
    """The column of a name or alias; case does not matter.

    Raises:
        StrettoError: there is none; names the nearest.
    """
    known = _NAMES.get(name.strip().lower())
    if known is None:
        near = nearest(name.lower(), _NAMES)
        where = f"`stretto predict --table-columns` lists all, your own start with {OWN}"
        raise StrettoError(
            f"there is no column {name!r}", hint=f"did you mean {near!r}? {where}" if near else where
        )
    return known
