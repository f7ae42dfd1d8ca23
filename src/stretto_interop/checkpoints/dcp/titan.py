"""Checkpoints of torchtitan, in and out, tensor by tensor, with the states of AdamW.

A checkpoint there says nothing of the architecture: the shape is the caller's, and every tensor is checked
against it before anything is written. An export has all that torchtitan loads but the position in its data:
it starts with `checkpoint.exclude_from_loading` naming `dataloader`.

torchtitan keeps queries, keys and values apart, gate and up projection too, and numbers the layers under
`layers`. Names are those of its state_dict_adapter.py of each model: in 0.3 (main of August 2026) first, in
0.2 and before it second. Two things differ beyond names:

- Its Llama turns neighbouring features, (0, 1), (2, 3), ..., where Stretto's turns a feature of the first
  half of a head with one of the second, as transformers does: the rows of queries and keys are in another
  order.
- 0.3 trains queries, keys and values as one tensor, group by group of heads that share keys: the model's
  state has them apart, but the optimiser's states are of that one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from stretto.engine.checkpoint.index import MODEL, OPTIM
from stretto.engine.checkpoint.read import StoredTensors
from stretto.engine.checkpoint.shards import Streamed
from stretto.engine.optim.base import decays
from stretto.engine.optim.rate import LearningRate
from stretto.errors import StrettoError, nearest
from stretto.job.optimiser import Optimiser
from stretto.job.parameters import Sizes, parameter_shapes
from stretto.job.shape import ModelShape
from stretto_interop.checkpoints.dcp.reader import Archives, DcpIndex, find_folder, read_dcp_index
from stretto_interop.checkpoints.dcp.transfer import (
    MOMENTS,
    ExportedCheckpoint,
    Incoming,
    OpenImport,
    Progress,
    open_export,
    saved_optimiser,
    steps_of,
    write_whole,
)

# ------------------------------------------------------------------ names

View = Callable[[Tensor], Tensor]
VERSIONS = ("0.3", "0.2")
HEADS = ("lm_head.weight", "output.weight")

_EXPERTS = ("moe.routed_experts.inner_experts", "moe.experts")
_CORRECTION = ("moe.expert_bias_E", "moe.expert_bias")
# names in ours of one tensor: of those it is made of there, each in every version
_NAMES: dict[str, tuple[tuple[str, ...], ...]] = {
    "embed.tok.weight": (("tok_embeddings.weight",),),
    "head.norm.weight": (("norm.weight",),),
    "head.out.weight": (HEADS,),
    "norm1.weight": (("attention_norm.weight",),),
    "norm2.weight": (("ffn_norm.weight",),),
    "attn.q_norm.weight": (("attention.q_norm.weight",),),
    "attn.k_norm.weight": (("attention.k_norm.weight",),),
    "attn.proj.weight": (("attention.wo.weight",),),
    "attn.q.weight": (("attention.wq.weight",),),
    "attn.q_down.weight": (("attention.wq_a.weight",),),
    "attn.q_down_norm.weight": (("attention.q_norm.weight",),),
    "attn.q_up.weight": (("attention.wq_b.weight",),),
    "attn.kv_down.weight": (("attention.wkv_a.weight",),),
    "attn.kv_down_norm.weight": (("attention.kv_norm.weight",),),
    "attn.kv_up.weight": (("attention.wkv_b.weight",),),
    "mlp.gate_up.weight": (("feed_forward.w1.weight",), ("feed_forward.w3.weight",)),
    "mlp.down.weight": (("feed_forward.w2.weight",),),
    "mlp.router.gate.weight": (("moe.router.gate.weight",),),
    "mlp.router.correction": (_CORRECTION,),
    "mlp.experts.gate_up": (
        (f"{_EXPERTS[0]}.w1_EFD", f"{_EXPERTS[1]}.w1"),
        (f"{_EXPERTS[0]}.w3_EFD", f"{_EXPERTS[1]}.w3"),
    ),
    "mlp.experts.down": ((f"{_EXPERTS[0]}.w2_EDF", f"{_EXPERTS[1]}.w2"),),
    "mlp.shared.gate_up.weight": (("moe.shared_experts.w1.weight",), ("moe.shared_experts.w3.weight",)),
    "mlp.shared.down.weight": (("moe.shared_experts.w2.weight",),),
}
_QKV = tuple(
    (f"attention.qkv_linear.{item}.weight", f"attention.{item}.weight") for item in ("wq", "wk", "wv")
)
_FUSED = "attention.qkv_linear.wqkv.weight"


@dataclass(frozen=True)
class TitanTensor:
    """A tensor of torchtitan, and which of its values are which of Stretto's.

    Attributes:
        names: one for each version that differs, the newest first.
        views: pairs of views of equal shape, of Stretto's tensor and of torchtitan's; together they cover
            torchtitan's.
    """

    names: tuple[str, ...]
    shape: Sizes
    views: tuple[tuple[View, View], ...]

    @property
    def in_order(self) -> bool:
        """True if its values lie in the same order in Stretto's tensor."""
        return len(self.views) == 1 and self.views[0][1] is _identical

    def name(self, version: str) -> str:
        """Its name in one of VERSIONS."""
        return self.names[0] if version == VERSIONS[0] else self.names[-1]


@dataclass(frozen=True)
class TitanRule:
    """A parameter of Stretto, and the tensors of torchtitan that make it up.

    Attributes:
        fused: the tensor whose optimiser states are those of all parts, if there is one.
    """

    parameter: str
    shape: Sizes
    parts: tuple[TitanTensor, ...]
    fused: TitanTensor | None = None


def rules(shape: ModelShape) -> Iterator[TitanRule]:
    """Yield a rule for every parameter of the model; a tied head is the embedding's.

    Raises:
        StrettoError: torchtitan has no such model.
    """
    _check(shape)
    for parameter, sizes in parameter_shapes(shape).items():
        prefix, module = "", parameter
        if parameter.startswith("blocks."):
            _, block, module = parameter.split(".", 2)
            prefix = f"layers.{block}."
        if module == "attn.qkv.weight":
            yield _qkv(parameter, prefix, shape)
        elif module in _NAMES:
            yield TitanRule(parameter, sizes, tuple(_stacked(_NAMES[module], prefix, sizes)))
        else:
            raise AssertionError(f"{parameter} belongs to a shape that _check refuses")


def is_trained(parameter: str) -> bool:
    """True if torchtitan trains the parameter; the router's correction is a buffer there."""
    return not parameter.endswith(".router.correction")


def trained(rule: TitanRule, version: str) -> tuple[TitanTensor, ...]:
    """Return the parameters that the optimiser of a torchtitan version has for one of Stretto's."""
    if not is_trained(rule.parameter):
        return ()
    return rule.parts if rule.fused is None or version != VERSIONS[0] else (rule.fused,)


def correction(layer: int, version: str) -> str:
    """Return the name of a layer's expert biases, which torchtitan has in every layer with experts."""
    return f"layers.{layer}.{_CORRECTION[VERSIONS.index(version)]}"


def _identical(tensor: Tensor) -> Tensor:
    return tensor


def _stacked(names: tuple[tuple[str, ...], ...], prefix: str, sizes: Sizes) -> Iterator[TitanTensor]:
    """Yield tensors of equal sizes that Stretto stacks along the dimension before the last."""
    count = len(names)
    if count == 1:
        yield TitanTensor(tuple(prefix + name for name in names[0]), sizes, ((_identical, _identical),))
        return
    dim = len(sizes) - 2  # experts, where there are any, come first
    length = sizes[dim] // count
    part = (*sizes[:dim], length, *sizes[dim + 1 :])
    for i, each in enumerate(names):
        narrow = partial(torch.narrow, dim=dim, start=i * length, length=length)
        yield TitanTensor(tuple(prefix + name for name in each), part, ((narrow, _identical),))


def _qkv(parameter: str, prefix: str, shape: ModelShape) -> TitanRule:
    """Return the rule of queries, keys and values, which Stretto stacks by rows."""
    groups, width = shape.kv_heads, shape.head_dim
    members = (shape.heads // groups, 1, 1)  # heads of queries, keys and values in a group
    parts, views = list[TitanTensor](), list[tuple[View, View]]()
    for i, (names, count) in enumerate(zip(_QKV, members, strict=True)):
        # with plain heads, its models without norms of queries and keys turn neighbours
        neighbours = (shape.attention.norm is None) is not shape.attention.interleaved
        paired = neighbours and names is not _QKV[2]
        features = (width // 2, 2) if paired else (width,)
        before, rows = sum(members[:i]), groups * count * width
        view = _our_heads(before * groups * width, rows, (groups, count), features)
        separate = _their_heads((groups, count, *features), 0, count)
        views.append((view, _their_heads((groups, sum(members), *features), before, count)))
        parts.append(
            TitanTensor(tuple(prefix + name for name in names), (rows, shape.hidden), ((view, separate),))
        )
    sizes = (sum(members) * groups * width, shape.hidden)
    return TitanRule(parameter, sizes, tuple(parts), TitanTensor((prefix + _FUSED,), sizes, tuple(views)))


def _our_heads(start: int, rows: int, heads: tuple[int, int], features: tuple[int, ...]) -> View:
    """Return a view of Stretto's heads as (groups, members, *features, hidden), with the features
    in order.
    """

    def view(tensor: Tensor) -> Tensor:
        separate = tensor.narrow(0, start, rows).unflatten(0, (*heads, *reversed(features)))
        return separate.transpose(2, 3) if len(features) > 1 else separate

    return view


def _their_heads(sizes: tuple[int, ...], start: int, count: int) -> View:
    """Return the same view of torchtitan's heads: members `start` and following of each group."""
    return lambda tensor: tensor.unflatten(0, sizes).narrow(1, start, count)


_BLOCKS = {  # what all of its models have
    "encoder_layers": 0,
    "position_embedding": "rotary",
    "mlp": "swiglu",
    "norm": "rms",
    "block_norms": "pre",
    "bias": False,
    "dropout": 0.0,
    "embedding_scale": 1.0,
    "embedding_norm": False,
    "logit_scale": 1.0,
    "logit_softcap": 0.0,
}
_ROUTER = {"router_bias": False, "shared_gate": False, "capacity": None, "every": 1}
_ATTENTION = {
    "qkv_bias": (None, False),
    "proj_bias": (None, False),
    "norm": (None, "head"),
    "sinks": (False,),
    "window": (None,),
    "softcap": (None,),
    "query_scale": (None,),
}


def _check(shape: ModelShape) -> None:
    """Raise StrettoError for a model that none of torchtitan's converted models computes, apart from names
    and sizes.
    """
    values: list[tuple[str, object, tuple[object, ...]]] = [
        (name, getattr(shape, name), (default,)) for name, default in _BLOCKS.items()
    ]
    values += [(f"attention.{n}", getattr(shape.attention, n), default) for n, default in _ATTENTION.items()]
    latent = shape.latent is not None
    moe, rope = shape.moe, shape.rope
    scalings = (None, "yarn") if latent else (None,) if shape.attention.norm else (None, "llama3")
    values.append(("rope.type", rope and rope.type, scalings))
    if latent:
        values.append(("attention.interleaved", shape.attention.interleaved, (True,)))
    if latent and rope is not None:
        values.append(("rope.mscale_all_dim", rope.mscale_all_dim, (rope.mscale,)))
    if moe is not None:
        values += [(f"moe.{name}", getattr(moe, name), (default,)) for name, default in _ROUTER.items()]
        values.append(
            ("attention.norm of a model with experts", shape.attention.norm, (None if latent else "head",))
        )
        if moe.groups > 1:
            values.append(("moe.group_score", moe.group_score, ("top2",)))
    for name, value, allowed in values:
        if value not in allowed:
            raise StrettoError(
                f"model.{name} {value!r} has no counterpart in torchtitan's models of llama3, qwen3 and "
                f"deepseek_v3, which have {' or '.join(repr(item) for item in allowed)}",
                hint="export for transformers instead, without --format dcp",
            )


# ------------------------------------------------------------------ import

_PREFIXES = ("", "model.")  # of parameters: of today, and of torchtitan before 0.1
_NO_PARAMETERS = ("optimizer.", "lr_scheduler.", "dataloader.", "train_state.")

Parts = Sequence[tuple[str, TitanTensor]]  # with the names that they have in a checkpoint


class DcpImport(OpenImport):
    """A checkpoint of torchtitan.

    Args:
        source: the folder of one step, or the folder of all steps, of which the newest is read.
        states: import the optimiser's states, if there are any.

    Raises:
        StrettoError: no such checkpoint, a damaged one, or one of another model.
    """

    def __init__(self, source: Path, shape: ModelShape, *, states: bool = True) -> None:
        self.source, self.shape = find_folder(source), shape
        self._names = _Names(read_dcp_index(self.source))
        self.archives = Archives(self._names.index)
        self.notes, self.samples = list[str](), 0
        try:
            self._match(states)
        except BaseException:
            self.close()
            raise

    def _match(self, states: bool) -> None:
        """Make a tensor for every parameter and state, after checking all names, types and sizes."""
        mapping = list(rules(self.shape))
        weights = {rule.parameter: self._names.of_weight(rule) for rule in mapping}
        tensors = [self._joined(f"model.{r.parameter}", r.shape, weights[r.parameter]) for r in mapping]
        self.parameters = sum(prod(rule.shape) for rule in mapping)
        self._check_unused({name for parts in weights.values() for name, _ in parts})
        self.updates, self.optimiser = 0, None
        if states and any(name.startswith(STATE) for name in self._names.index.tensors):
            section = {
                rule.parameter: self._names.of_state(rule) for rule in mapping if is_trained(rule.parameter)
            }
            parameter = {rule.parameter: rule.shape for rule in mapping}
            tensors += [
                self._joined(
                    f"optim.{moment}.{name}",
                    parameter[name],
                    [(f"{each}.{moment}", part) for each, part in parts],
                )
                for name, parts in section.items()
                for moment in MOMENTS
            ]
            fqns = {name: [each.removeprefix(STATE) for each, _ in parts] for name, parts in section.items()}
            self.optimiser, self.updates = read_optimiser(self.archives, fqns, parameter, self.notes)
        self.tensors = tensors
        self.step = self.archives.count("train_state.step", self.updates)
        self.tokens = self.archives.count("train_state.ntokens_seen", 0)

    def _joined(self, name: str, shape: tuple[int, ...], parts: Parts) -> Incoming:
        """Return one of Stretto's tensors, whose parts must be of one type."""
        kinds = sorted({self._names.index.tensors[each].dtype for each, _ in parts})
        if len(kinds) > 1:
            raise StrettoError(
                f"{' and '.join(each for each, _ in parts)} are of different types, {', '.join(kinds)}"
            )
        dtype: torch.dtype = getattr(torch, kinds[0])
        return Incoming(name, shape, dtype, lambda: self._read(shape, dtype, parts))

    def _read(self, shape: tuple[int, ...], dtype: torch.dtype, parts: Parts) -> Tensor:
        complete = torch.empty(shape, dtype=dtype)
        for name, part in parts:
            if part.in_order:
                self.archives.read_tensor(name, part.views[0][0](complete))
                continue
            foreign = torch.empty(part.shape, dtype=dtype)
            self.archives.read_tensor(name, foreign)
            for view, other in part.views:
                view(complete).copy_(other(foreign))
        return complete

    def _check_unused(self, used: set[str]) -> None:
        """Raise StrettoError for parameters that the model does not have: they would be lost silently."""
        for name in sorted(self._names.index.tensors.keys() - used):
            plain = name.removeprefix(self._names.prefix)
            if name.startswith(_NO_PARAMETERS) or (self.shape.tied and plain in HEADS):
                continue
            if plain.endswith((".moe.expert_bias_E", ".moe.expert_bias")):
                experts = None if self.shape.moe is None else self.shape.moe.experts
                if self._names.index.tensors[name].shape == (experts,) and not self._read_full(name).any():
                    continue  # the model balances by a loss instead
            raise StrettoError(
                f"{name} in {self.source} has no place in the model",
                hint="--model must be the model that was trained",
            )

    def _read_full(self, name: str) -> Tensor:
        stored = self._names.index.tensors[name]
        tensor = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
        self.archives.read_tensor(name, tensor)
        return tensor

    def check_head(self) -> None:
        """Check that a head in the files equals the embedding that it is tied to."""
        tensors = self._names.index.tensors
        heads = [self._names.prefix + head for head in HEADS if self._names.prefix + head in tensors]
        embedding = self._names.prefix + "tok_embeddings.weight"
        if not self.shape.tied or not heads or embedding not in tensors:
            return
        equal = tensors[heads[0]].shape == tensors[embedding].shape
        if not equal or not torch.equal(self._read_full(heads[0]), self._read_full(embedding)):
            raise StrettoError(
                f"{heads[0]} differs from the embedding, but the model's head is tied to it",
                hint="--model must be the model that was trained",
            )


class _Names:
    """The names of the tensors in one checkpoint, among those of torchtitan's versions."""

    def __init__(self, index: DcpIndex) -> None:
        self.index = index
        self.prefix = next((p for p in _PREFIXES if f"{p}tok_embeddings.weight" in index.tensors), "")

    def of_weight(self, rule: TitanRule) -> Parts:
        """The tensors of a parameter."""
        return [(self._present([self.prefix + n for n in part.names], part), part) for part in rule.parts]

    def of_state(self, rule: TitanRule) -> Parts:
        """Return the tensors of a parameter's optimiser states, without the name of the state, after checking
        that all are there in the expected size.
        """
        fused = rule.fused
        parts = [(part.names, part) for part in rule.parts]
        if fused is not None and f"{STATE}{fused.names[0]}.{MOMENTS[0]}" in self.index.tensors:
            parts = [(fused.names[:1], fused)]
        result = list[tuple[str, TitanTensor]]()
        for names, part in parts:
            full = [
                self._present([f"{STATE}{name}.{moment}" for name in names], part, WEIGHTS_ONLY)
                for moment in MOMENTS
            ]
            result.append((full[0].removesuffix(f".{MOMENTS[0]}"), part))
        return result

    def _present(self, names: Sequence[str], part: TitanTensor, hint: str | None = None) -> str:
        """Return the first of the names that exists, after checking the tensor's size."""
        tensors = self.index.tensors
        name = next((name for name in names if name in tensors), None)
        if name is None:
            closest = nearest(names[0], tensors)
            raise StrettoError(
                f"{self.index.folder} has no tensor {' or '.join(names)}, {list(part.shape)} in the model",
                hint=hint or (closest and f"the nearest name in it is {closest}") or "is it torchtitan's?",
            )
        if (shape := tensors[name].shape) != tuple(part.shape):
            raise StrettoError(
                f"{name} has shape {list(shape)} in {self.index.folder}, but {list(part.shape)} in the model",
                hint="--model must be the model that was trained",
            )
        return name


# ------------------------------------------------------------------ the optimiser

GROUP = "optimizer.param_groups."
STATE = "optimizer.state."
_STATES = ("step", *MOMENTS)
WEIGHTS_ONLY = "--weights-only imports the model without its optimiser"


def read_optimiser(
    archives: Archives,
    names_there: Mapping[str, Sequence[str]],
    shapes: Mapping[str, Sizes],
    notes: list[str],
) -> tuple[Optimiser, int]:
    """The optimiser as it was set, and the number of updates that its states count.

    Args:
        names_there: torchtitan's names of the parts of each of our parameters, as its optimiser has them.
        shapes: shapes of our parameters.
        notes: receives a sentence for each setting that is different here.

    Raises:
        StrettoError: it is not AdamW, or counts differ.
    """
    index = archives.index
    names = [name for each in names_there.values() for name in each]
    expected = {f"{STATE}{name}.{state}" for name in names for state in _STATES}
    states = {name for name in (*index.tensors, *index.objects) if name.startswith(STATE)}
    for verb, wrong in (("has", states - expected), ("lacks", expected - states)):
        if wrong:
            raise StrettoError(
                f"{index.folder} {verb} the optimiser's state {min(wrong)}, one of {len(wrong)}; here they "
                f"are AdamW's {', '.join(_STATES)} of each parameter",
                hint=WEIGHTS_ONLY,
            )
    counts = {archives.count(f"{STATE}{name}.step", 0) for name in names}
    if len(counts) > 1:
        raise StrettoError(
            f"{index.folder}: the optimiser made {min(counts)} updates of some weights and "
            f"{max(counts)} of others, here all have the same",
            hint=WEIGHTS_ONLY,
        )

    def setting(key: str, default: float) -> float:
        return archives.number(f"{GROUP}{names[0]}.{key}", default)

    for key in ("amsgrad", "maximize"):
        if setting(key, False):
            raise StrettoError(f"{index.folder}: AdamW with {key} is not AdamW here", hint=WEIGHTS_ONLY)
    rate = setting("initial_lr", 0.0) or setting("lr", 0.0)
    if not rate:
        notes.append("the optimiser's settings are not in the checkpoint: they are AdamW's usual ones")
        return Optimiser(), counts.pop()
    decay, spared = _decay(archives, names_there, shapes, notes)
    if decay and not setting("decoupled_weight_decay", True):
        notes.append("the weight decay of Adam was part of its gradient; that of AdamW here is not")
    full = f"{GROUP}{names[0]}.betas"
    value = archives.read_object(full) if full in index.objects else None
    betas = tuple(cast("Sequence[Any]", value)) if isinstance(value, tuple | list) else ()
    if len(betas) != 2 or not all(type(beta) is float and 0.0 <= beta < 1.0 for beta in betas):
        raise StrettoError(f"{full} in {index.folder} is no pair of numbers below 1", hint=WEIGHTS_ONLY)
    optimiser = Optimiser(
        lr=rate,
        betas=(betas[0], betas[1]),
        eps=setting("eps", 1e-8),
        weight_decay=decay,
        no_decay=spared,
    )
    return optimiser, counts.pop()


def _decay(
    archives: Archives,
    names_there: Mapping[str, Sequence[str]],
    shapes: Mapping[str, Sizes],
    notes: list[str],
) -> tuple[float, tuple[str, ...]]:
    """Return the weight decay, and the parameters without it that would have it in Stretto."""
    decay = {
        parameter: max(archives.number(f"{GROUP}{name}.weight_decay", 0.0) for name in each)
        for parameter, each in names_there.items()
    }
    decaying = [parameter for parameter in names_there if decays(parameter, shapes[parameter])]
    default = max((decay[parameter] for parameter in decaying), default=0.0)
    if norms := [parameter for parameter in names_there if decay[parameter] and parameter not in decaying]:
        notes.append(
            f"{len(norms)} norms and biases had a weight decay of {decay[norms[0]]}; here they have none"
        )
    if other := [parameter for parameter in decaying if decay[parameter] not in (0.0, default)]:
        notes.append(f"the weight decay of {other[0]} was {decay[other[0]]}; here it is {default} for all")
    return default, tuple(parameter for parameter in decaying if default and not decay[parameter])


# ------------------------------------------------------------------ export


def export_dcp(
    path: str | Path, out: str | Path, version: str = VERSIONS[0], progress: Progress | None = None
) -> ExportedCheckpoint:
    """Write a checkpoint for torchtitan: the model and, if the optimiser is AdamW, its states, settings and
    step. One tensor at a time is in memory.

    Args:
        version: torchtitan's, one of VERSIONS; names and the optimiser's states differ between them.
        progress: called with the bytes written so far and the total.

    Raises:
        StrettoError: a damaged checkpoint, a model that torchtitan does not have, a folder with files, or no
            room.
    """
    out, notes = Path(out), list[str]()
    with open_export(path, out, rules, framework="torchtitan", form="dcp") as opened:
        manifest, mapping = opened.manifest, opened.mapping
        stored = opened.stored
        source = _Source(stored, progress)
        state = _weights(source, mapping, opened.shape, version)
        step, states = None, [rule.parameter for rule in mapping if is_trained(rule.parameter)]
        if optimiser := saved_optimiser(manifest.meta, stored, states, notes):
            step = manifest.step
            updates = int(manifest.meta.get("updates") or step)
            state["optimizer"] = _states(source, mapping, version, updates)
            state["optimizer"] |= _groups(mapping, version, optimiser, updates, steps_of(manifest.meta))
            state["lr_scheduler"] = _schedule(optimiser.lr, updates, version)
            state["train_state"] = {"step": step, "ntokens_seen": int(manifest.meta.get("tokens") or 0)}
        files = write_whole(state, out, source.total, path)
    return ExportedCheckpoint(files=files, step=step, notes=notes)


class _Source:
    """Makes torchtitan's tensors from Stretto's, in the order of Stretto's, so that each is read once."""

    def __init__(self, stored: StoredTensors, progress: Progress | None) -> None:
        self.stored = stored
        self._progress = progress
        self.total = self._done = 0
        self._last: tuple[str, Tensor | None] = ("", None)

    def part(self, name: str, part: TitanTensor) -> Streamed:
        """Return a tensor of torchtitan, made from the stored one of that name."""
        dtype: torch.dtype = getattr(torch, self.stored.saved[name].dtype)
        self.total += prod(part.shape) * dtype.itemsize
        return Streamed(
            part.shape, dtype, {(0,) * len(part.shape): (part.shape, lambda: self._get(name, part, dtype))}
        )

    def _get(self, name: str, part: TitanTensor, dtype: torch.dtype) -> Tensor:
        if self._last[0] != name:
            self._last = ("", None)  # free the one before first
            self._last = (name, self.stored.read(name))
        stored = self._last[1]
        assert stored is not None
        if part.in_order:
            exported = part.views[0][0](stored).contiguous()
        else:
            exported = torch.empty(part.shape, dtype=dtype)
            for view, other in part.views:
                other(exported).copy_(view(stored))
        self._done += exported.nbytes
        if self._progress is not None:
            self._progress(self._done, self.total)
        return exported


def _weights(
    source: _Source, mapping: Sequence[TitanRule], shape: ModelShape, version: str
) -> dict[str, Any]:
    """Return the model's state: parameters, a tied head under both names, and the router's corrections."""
    state: dict[str, Any] = {}
    for rule in mapping:
        for part in rule.parts:
            state[part.name(version)] = source.part(MODEL + rule.parameter, part)
            if shape.tied and rule.parameter == "embed.tok.weight":
                state[HEADS[VERSIONS.index(version)]] = source.part(MODEL + rule.parameter, part)
    for i in range(shape.layers):
        moe = shape.block(i).moe
        if moe is not None and (name := correction(i, version)) not in state:
            state[name] = torch.zeros(moe.experts)
    return state


def _states(source: _Source, mapping: Sequence[TitanRule], version: str, updates: int) -> dict[str, Any]:
    """Return AdamW's states by the name of each parameter."""
    state: dict[str, Any] = {}
    for rule in mapping:
        for part in trained(rule, version):
            name = part.name(version)
            state[f"state.{name}.step"] = torch.tensor(float(updates))
        for moment in MOMENTS if is_trained(rule.parameter) else ():
            for part in trained(rule, version):
                name = part.name(version)
                state[f"state.{name}.{moment}"] = source.part(f"{OPTIM}{moment}.{rule.parameter}", part)
    return state


def _groups(
    mapping: Sequence[TitanRule], version: str, optimiser: Optimiser, updates: int, steps: int | None
) -> dict[str, Any]:
    """Return AdamW's settings, once for every parameter, with the learning rate of the next update."""
    rate = optimiser.lr if steps is None else LearningRate.of(optimiser, steps)(updates)
    adamw = torch.optim.AdamW(
        [torch.zeros(1)],
        lr=optimiser.lr,
        betas=optimiser.betas,
        eps=optimiser.eps,
        fused=True,  # torchtitan's default
        foreach=False,
    )
    group = {name: value for name, value in adamw.param_groups[0].items() if name != "params"}
    group |= {"lr": rate, "initial_lr": optimiser.lr}
    state: dict[str, Any] = {}
    for rule in mapping:
        decay = optimiser.weight_decay if decays(rule.parameter, rule.shape, optimiser.no_decay) else 0.0
        for part in trained(rule, version):
            prefix = f"param_groups.{part.name(version)}"
            state |= {f"{prefix}.{key}": value for key, value in {**group, "weight_decay": decay}.items()}
    return state


def _schedule(rate: float, updates: int, version: str) -> dict[str, Any]:
    """Return the state of torchtitan's learning-rate schedule: how often it was called."""
    if version == VERSIONS[0]:
        return {"last_epoch": updates}
    adamw = torch.optim.AdamW([torch.zeros(1)], lr=rate)
    ratio = cast("Callable[[int], float]", partial(float))  # of which torch keeps the attributes, none
    state = torch.optim.lr_scheduler.LambdaLR(adamw, ratio).state_dict()
    return {**state, "last_epoch": updates, "_step_count": updates + 1}
