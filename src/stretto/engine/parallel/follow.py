"""Propagates the splits of activations through a traced model, and finds where they must be converted.

The plain model is traced with torch.fx. Modules convert their arguments; functions and methods between them
cannot, so all of their arguments must have the same split, one that the function preserves.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from inspect import signature
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.loss import _Loss
from torch.utils import _pytree as pytree

from stretto.engine.parallel.splits import Change, Split
from stretto.engine.parallel.styles import (
    BatchParallel,
    ColumnParallel,
    GatherBatch,
    ParallelStyle,
    Replicate,
    SplitDropout,
)
from stretto.engine.parallel.tensor.dropout import KeyedDropout
from stretto.errors import StrettoError

Styles = Mapping[str, tuple[nn.Module, ParallelStyle]]
TORCH = str(Path(torch.__file__).parent)

ELEMENTWISE_MODULES: tuple[type[nn.Module], ...] = (
    KeyedDropout,
    nn.CELU,
    nn.Dropout,
    nn.ELU,
    nn.GELU,
    nn.Hardsigmoid,
    nn.Hardswish,
    nn.Hardtanh,
    nn.Identity,
    nn.LeakyReLU,
    nn.LogSigmoid,
    nn.Mish,
    nn.ReLU,
    nn.ReLU6,
    nn.SELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Softplus,
    nn.Softsign,
    nn.Tanh,
)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ELEMENTWISE = _names(
    """abs add celu clamp clone contiguous detach div double elu exp float gelu half hardsigmoid hardswish
    hardtanh iadd imul isub leaky_relu log log1p logsigmoid mish mul neg pow reciprocal relu relu6 rsqrt
    rsub selu sigmoid silu softplus softsign sqrt square sub tanh to truediv type type_as"""
)
_REDUCTIONS = _names(
    """all amax amin any argmax argmin logsumexp max mean median min norm prod std std_mean sum var
    var_mean"""
)
_ALONG_FIRST = _names(
    """cat concat cumprod cumsum flip gather index_select log_softmax narrow select softmax softmin stack
    unbind unsqueeze"""
)
# position and default of the argument that names the dimension along which a function mixes elements;
# a default of None means all dimensions
_ALONG: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys(_REDUCTIONS, (1, None)),
    **dict.fromkeys(_ALONG_FIRST, (1, 0)),
    **dict.fromkeys(("chunk", "roll", "split", "tensor_split"), (2, 0)),
    "sort": (1, -1),
    "topk": (2, -1),
}
_OVER_BATCH = _names(
    """batch_norm binary_cross_entropy binary_cross_entropy_with_logits cross_entropy huber_loss kl_div
    l1_loss mse_loss nll_loss smooth_l1_loss t"""
)
_SWAPPING = _names("transpose swapaxes swapdims")
_NOT_TENSORS = _names("dim numel size len ndimension is_floating_point")
_SIZES = _names("shape ndim dtype device")
_SEVERAL = _names("chunk max median min sort split std_mean tensor_split topk unbind var_mean")


@dataclass(kw_only=True)
class SplitPropagation:
    """The points at which a model's activations change their split.

    Attributes:
        before: changes of each module's arguments, by position or keyword.
        after: change of each module's output.
        output: changes of the leaves of the model's output, in order.
        splits: split of the activations that each leaf module computes on, with the full size of the last
            dimension if that is split.
        terms: layers split by output features whose input gradients the preceding conversion sums.
        rounds: changes of the leaves of the outputs of modules with `GatherBatch` style.
    """

    before: dict[str, dict[int | str | None, Change]] = field(
        default_factory=dict[str, "dict[int | str | None, Change]"]
    )
    after: dict[str, Change] = field(default_factory=dict[str, Change])
    output: list[Change | None] = field(default_factory=list["Change | None"])
    splits: dict[str, tuple[Split, int]] = field(default_factory=dict[str, tuple[Split, int]])
    terms: set[str] = field(default_factory=set[str])
    rounds: dict[str, list[Change | None]] = field(default_factory=dict[str, "list[Change | None]"])

    def of(self, name: str) -> tuple[Split, int] | None:
        """Return the split and the full last dimension of the activations of a module, if known."""
        while name and name not in self.splits:
            name = name.rpartition(".")[0]
        return self.splits.get(name)

    def only(self, split: Split) -> SplitPropagation:
        """Return only the modules that compute on one split."""
        return SplitPropagation(
            splits={name: entry for name, entry in self.splits.items() if entry[0] == split}
        )


@dataclass(frozen=True)
class _Value:
    """The result of a node of the graph.

    Attributes:
        split: split of an activation, or None for other values, such as sizes and parameters.
        size: full size of the last dimension if that is split.
        partial: for a parameter, True if each rank's gradient is the term of its rows; None for other values.
        several: True for a tuple of tensors.
    """

    split: Split | None = None
    size: int = 0
    partial: bool | None = None
    several: bool = False


def propagate_splits(model: nn.Module, styles: Styles, inputs: Split, outputs: Split) -> SplitPropagation:
    """Trace the plain model, and find the changes of split between its modules.

    Args:
        styles: modules and styles, by module name.
        inputs, outputs: split of the model's inputs, and the desired split of its output.

    Raises:
        StrettoError: the model cannot be traced, or a function cannot compute on the splits of its arguments.
    """
    flow = SplitPropagation()
    _Walk(model, "", styles, inputs=inputs, outputs=outputs, flow=flow).run()
    return flow


def declared(styles: Styles) -> SplitPropagation:
    """Return the changes that the styles declare, for a model that is not traced.

    Raises:
        StrettoError: a style declares the split of its input or output, but cannot be converted.
    """
    flow = SplitPropagation()
    for name, (_, style) in styles.items():
        if style.natural is None:
            if style.input is not None or style.output is not None:
                raise StrettoError(f"sharding plan: {name!r} has {style}, which cannot be converted")
            continue
        if isinstance(style, GatherBatch):
            raise StrettoError(
                f"sharding plan: {name!r} has {style}, whose layers have to be traced", hint="convert=True"
            )
        input_split, output_split = style.natural
        if style.input not in (None, input_split):
            after = _taken(style, style.input)
            flow.before[name] = {None: (style.input, after)}
            if after == "assembled":
                flow.terms.add(name)
        if style.output not in (None, output_split):
            flow.after[name] = output_split, style.output
        flow.splits[name] = input_split, 0
    return flow


def defaults(model: nn.Module) -> dict[str, Any] | None:
    """Return the default values of a model's forward that are not tensors, with which it is traced."""
    arguments = signature(model.forward).parameters.values()
    plain = {
        parameter.name: parameter.default
        for parameter in arguments
        if isinstance(parameter.default, bool | int | float | None)
    }
    return plain or None


def check_call(model: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Reject arguments that a traced model was not traced with; a forward pre-hook.

    Raises:
        StrettoError: an argument differs from the default with which the model was traced.
    """
    called = signature(model.forward).bind(*args, **named).arguments
    for name, value in (defaults(model) or {}).items():
        if name in called and called[name] is not value and not (called[name] == value):
            raise StrettoError(
                f"{type(model).__name__} is called with {name}, and was traced with {name}={value!r}",
                hint=f"leave {name} out, or make it an argument without a default",
            )


def _taken(style: ParallelStyle, split: Split) -> Split:
    """Return the split to which a module's input is converted. The input gradients of a layer split by output
    features are terms of a sum, which the conversion's backward can compute.
    """
    assert style.natural is not None
    input_split = style.natural[0]
    return "assembled" if isinstance(style, ColumnParallel) and split != "whole" else input_split


class _Tracer(fx.Tracer):
    record_stack_traces = True

    def __init__(self, prefix: str, styles: Styles) -> None:
        super().__init__()
        self._prefix, self._styles = prefix, styles

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        name = self._prefix + module_qualified_name
        style = self._styles[name][1] if name in self._styles else None
        if isinstance(style, GatherBatch):
            return True
        if any(other.startswith(f"{name}.") for other in self._styles):
            return False
        return style is not None or not isinstance(m, nn.Sequential)


class _Walk:
    """One pass over the graph of a module."""

    def __init__(
        self,
        root: nn.Module,
        prefix: str,
        styles: Styles,
        *,
        inputs: Split,
        outputs: Split,
        flow: SplitPropagation,
    ) -> None:
        self.root, self.prefix = root, prefix
        self.styles = styles
        self.inputs: Split = inputs
        self.outputs: Split = outputs
        self.flow = flow
        self.values = dict[fx.Node, _Value]()
        self.visits = dict[tuple[str, int | str], set[Change]]()

    def run(self) -> list[Change | None]:
        """Trace the module and return the changes of the leaves of its output."""
        location = f"{self.prefix.rstrip('.')!r}" if self.prefix else "the model"
        try:
            graph = _Tracer(self.prefix, self.styles).trace(self.root, concrete_args=defaults(self.root))
        except Exception as error:
            raise StrettoError(
                f"sharding plan: {location} ({type(self.root).__name__}) cannot be traced to see how its "
                f"activations are split: {error}",
                hint="give convert=False, and styles their input and output: ColumnParallel(input='batch')",
            ) from error
        for node in graph.nodes:
            if node.op == "output":
                changes = list[Change | None]()
                for leaf in pytree.tree_leaves(node.args[0]):
                    value = self._tensor(leaf)
                    split = None if value is None else value.split
                    changes.append(None if split is None or split == self.outputs else (split, self.outputs))
                if not self.prefix:
                    self.flow.output = changes
                return changes
            self.values[node] = self._value(node)
        raise AssertionError("a graph has an output")

    def _value(self, node: fx.Node) -> _Value:
        if node.op == "placeholder":
            return _Value(self.inputs)
        if node.op == "get_attr":
            name = self.prefix + str(node.target)
            tensor = self.root
            for part in name.removeprefix(self.prefix).split("."):
                tensor = getattr(tensor, part)
            style = self._style_over(name.rpartition(".")[0])
            return _Value(
                partial=isinstance(style, BatchParallel) if getattr(tensor, "requires_grad", False) else None
            )
        if node.op == "call_module":
            return self._module(node, self.prefix + str(node.target))
        return self._function(node)

    def _style_over(self, name: str) -> ParallelStyle | None:
        """Return the style of the module, or of the nearest module that contains it."""
        while name and name not in self.styles:
            name = name.rpartition(".")[0]
        return self.styles[name][1] if name in self.styles else None

    # ------------------------------------------------------------------ modules

    def _module(self, node: fx.Node, name: str) -> _Value:
        module = self.root.get_submodule(str(node.target))
        style = self.styles[name][1] if name in self.styles else None
        if style is None and any(True for _ in module.parameters()):
            style = self._style_over(name)
            style = Replicate() if isinstance(style, GatherBatch) else style
        arguments = [(at, self._tensor(arg)) for at, arg in (*enumerate(node.args), *node.kwargs.items())]
        tensors = {at: value for at, value in arguments if value is not None and value.split is not None}
        inside = [leaf for arg in (*node.args, *node.kwargs.values()) for leaf in pytree.tree_leaves(arg)]
        if sum(isinstance(leaf, fx.Node) for leaf in inside) > sum(
            value is not None for _, value in arguments
        ):
            raise StrettoError(
                f"sharding plan: {name!r} is called with tensors in a list or mapping, which cannot be "
                "converted",
                hint="hand them over one by one, or give convert=False",
            )
        if style is None or isinstance(style, SplitDropout):
            return self._unstyled(name, module, tensors)
        if style.natural is None:
            raise StrettoError(
                f"sharding plan: {name!r} has {style}, whose input and output cannot be converted",
                hint="BatchParallel, Replicate, ColumnParallel or RowParallel, without sequence",
            )
        input_split, output_split = style.natural
        for at, value in tensors.items():
            split = cast(Split, value.split)
            if style.input not in (None, split):
                raise StrettoError(
                    f"sharding plan: {name!r} is called with a tensor whose split is {split!r}, but its "
                    f"style has input={style.input!r}",
                    hint="leave input out: it is found by tracing",
                )
            after = _taken(style, split)
            self._change(name, at, split, after)
            if after == "assembled":
                self.flow.terms.add(name)
        if isinstance(style, GatherBatch):
            walk = _Walk(module, f"{name}.", self.styles, inputs="assembled", outputs="whole", flow=self.flow)
            self.flow.rounds[name] = walk.run()
        size = getattr(module, "out_features", 0)
        self.flow.splits[name] = input_split, 0
        if style.output is not None and style.output != output_split:
            self.flow.after[name] = output_split, style.output
            output_split = style.output
        return _Value(output_split, size if output_split == "features" else 0)

    def _change(self, name: str, at: int | str, before: Split, after: Split) -> None:
        """Record that a module's argument with split `before` needs split `after`: the same at each call,
        unless no call needs a conversion.
        """
        visited = self.visits.setdefault((name, at), set())
        visited.add((before, after))
        if len(visited) > 1 and any(before != after or after == "assembled" for before, after in visited):
            listed = " and as ".join(sorted(before for before, _ in visited))
            raise StrettoError(
                f"sharding plan: {name!r} is called several times, with tensors that are split as {listed}",
                hint="give the modules before it the same split at every call: output='batch' or 'whole'",
            )
        if before != after:
            self.flow.before.setdefault(name, {})[at] = before, after

    def _unstyled(self, name: str, module: nn.Module, tensors: Mapping[int | str, _Value]) -> _Value:
        """Propagate through a module without parameters, which computes on the split of its input if it
        can.
        """
        splits = {value.split for value in tensors.values()}
        if not splits:
            return _Value()
        sizes = {value.size for value in tensors.values()}
        stays: Split | None = None
        if len(splits) == 1 and len(sizes) == 1:
            only = cast(Split, next(iter(splits)))
            elementwise = isinstance(module, ELEMENTWISE_MODULES)
            mixes = isinstance(module, _Loss) or (
                isinstance(module, nn.Softmax | nn.LogSoftmax | nn.Softmin) and module.dim in (0, None)
            )
            if only in ("whole", "assembled") or elementwise or (only == "batch" and not mixes):
                stays = only
        output_split = stays or "whole"
        for at, value in tensors.items():
            self._change(name, at, cast(Split, value.split), output_split)
        size = max(sizes) if output_split == "features" else 0
        resolved = self.flow.splits.setdefault(name, (output_split, size))
        if resolved != (output_split, size) and isinstance(module, KeyedDropout | _BatchNorm):
            raise StrettoError(
                f"sharding plan: {name!r} is called several times, with tensors that are split differently",
                hint="use a module of its own for each",
            )
        return _Value(output_split, size)

    # ------------------------------------------------------------------ functions and methods

    def _function(self, node: fx.Node) -> _Value:
        called = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "?")
        name = str(called).strip("_")
        values = [self.values[source] for source in node.all_input_nodes]
        if name in _NOT_TENSORS or (
            name == "getattr" and node.args[1] in ("shape", "ndim", "dtype", "device")
        ):
            return _Value()
        splits = {value.split for value in values} - {None}
        partial = {value.partial for value in values} - {None}
        if not splits:
            return _Value(partial=partial.pop() if len(partial) == 1 else None)
        if len(splits) > 1:
            listed = " and ".join(sorted(str(split) for split in splits))
            raise StrettoError(
                f"sharding plan: {self._at(node, name)} is called with tensors that are split differently: "
                f"{listed}",
                hint="let one of the modules before it leave another split: RowParallel(output='batch')",
            )
        split = cast(Split, next(iter(splits)))
        if partial and partial != {split == "batch"}:
            raise StrettoError(
                f"sharding plan: {self._at(node, name)} uses a parameter on "
                f"{'a part of the batch' if split == 'batch' else 'the whole batch'}, but the style of its "
                f"module expects {'the whole' if split == 'batch' else 'a part'}",
                hint="BatchParallel() for the module of the parameter" if split == "batch" else "Replicate()",
            )
        if split == "batch":
            wrong = name in _OVER_BATCH or (name == "getattr" and node.args[1] in ("T", "mT", "H"))
            if name in _ALONG:
                at, default = _ALONG[name]
                dims = node.kwargs.get("dim", node.args[at] if len(node.args) > at else default)
                wrong = dims is None or 0 in (dims if isinstance(dims, list | tuple) else (dims,))
            elif name in _SWAPPING:
                wrong = 0 in node.args[1:3]
            elif name == "permute":
                order = node.args[1] if isinstance(node.args[1], list | tuple) else node.args[1:]
                wrong = cast("tuple[Any, ...]", order)[0] != 0
            elif name == "getitem" and not self.values[cast(fx.Node, node.args[0])].several:
                index = node.args[1]
                first = cast("tuple[Any, ...]", index)[0] if isinstance(index, tuple) and index else index
                wrong = first is not Ellipsis and first != slice(None)
            if wrong:
                raise StrettoError(
                    f"sharding plan: {self._at(node, name)} is over the samples of the batch, of which "
                    "each rank has its part",
                    hint="give the module before it output='whole'",
                )
        if split == "features" and name not in ELEMENTWISE:
            raise StrettoError(
                f"sharding plan: {self._at(node, name)} is called with a part of the features",
                hint="give the module before it output='whole' or 'batch'",
            )
        size = max(value.size for value in values)
        return _Value(split, size, several=name in _SEVERAL)

    def _at(self, node: fx.Node, name: str) -> str:
        """Describe the function and the line of the model's code that calls it."""
        lines = (node.stack_trace or "").splitlines()
        calls = [
            line.strip()
            for frame, line in pairwise(lines)
            if frame.lstrip().startswith("File ") and f"{TORCH}{os.sep}" not in frame
        ]
        return f"{name}() in {type(self.root).__name__}" + (f" ({calls[-1]!r})" if calls else "")

    def _tensor(self, argument: Any) -> _Value | None:
        return self.values[argument] if isinstance(argument, fx.Node) else None
