"""A user's network as the planner sees it: traced with torch.fx, and run without values to find shapes.

Whether an operator computes each sample alone, so that a part of the batch gives that part of its output, is
known of the usual layers. Everything else is tried on a few random samples.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from inspect import Parameter, signature
from math import prod
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as pytree

from stretto.autosplit.network import INPUT, OUTPUT, Network, Operator, Product, Split, StyleName
from stretto.engine.parallel.follow import ELEMENTWISE, ELEMENTWISE_MODULES
from stretto.engine.parallel.tensor.dropout import KeyedDropout
from stretto.errors import StrettoError

_MANY, _FEW = 4, 2  # samples of the trials; two, since BatchNorm refuses a single one
_LARGEST = 2**27  # elements of a trial
_CLOSE = 1e-9
_VIEWS = frozenset(("contiguous", "detach", "double", "float", "half", "to", "type", "type_as"))
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)


def trace_network(
    model: nn.Module,
    example: Sequence[Tensor],
    *,
    inputs: Split = "whole",
    outputs: Split = "whole",
    leaves: Iterable[str] = (),
) -> Network:
    """The operators of a model, for a batch of the example's shapes.

    Neither the model nor the example is computed with or changed; both may be on the meta device.

    Args:
        example: the model's inputs, with the samples of all ranks along dimension 0.
        inputs, outputs: how every rank calls the model, and what it returns, as for `parallelize`.
        leaves: names of modules that are taken as one operator.

    Raises:
        StrettoError: a model that cannot be traced, or that fails on such an input.
    """
    if not example or not all(isinstance(one, Tensor) and one.dim() for one in example):
        raise StrettoError(
            "the example input has no batch dimension", hint="a tensor such as torch.empty(256, 3, 224, 224)"
        )
    if fx.Tracer().is_leaf_module(model, ""):
        raise StrettoError(
            f"the model itself is {type(model).__name__}, and has no name by which a plan could refer to it",
            hint=f"nn.Sequential({type(model).__name__}(...))",
        )
    empty = _without_values(model)
    graph = _traced(empty, len(example), frozenset(leaves))
    empty.eval()  # nothing is drawn; the trace went the way of the model's mode
    batch = example[0].shape[0]
    runs = [
        _Run(empty, graph, [_samples(one, batch, count) for one in example], required=count == batch)
        for count in (batch, _MANY, _FEW)
    ]
    return _Reader(model, graph, runs, inputs, outputs).network()


def _without_values(model: nn.Module) -> nn.Module:
    """A copy on the meta device; no value is copied."""
    memo = dict[int, Any]()
    for parameter in model.parameters():
        meta = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(meta, parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return deepcopy(model, memo)


def _samples(one: Tensor, batch: int, count: int) -> Tensor:
    """An input of `count` samples; one without the batch stays as it is."""
    shape = (count, *one.shape[1:]) if one.shape[0] == batch else one.shape
    return torch.empty(shape, dtype=one.dtype, device="meta")


class _Tracer(fx.Tracer):
    """Stops at layers of torch.nn, modules with parameters of their own, and modules without any."""

    def __init__(self, leaves: frozenset[str]) -> None:
        super().__init__()
        self._leaves = leaves

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if module_qualified_name in self._leaves or next(m.parameters(recurse=False), None) is not None:
            return True
        if next(m.parameters(), None) is None:
            return not isinstance(m, nn.Sequential)
        return super().is_leaf_module(m, module_qualified_name)


def _traced(model: nn.Module, count: int, leaves: frozenset[str]) -> fx.Graph:
    for name in leaves:
        if name not in dict(model.named_modules()):
            raise StrettoError(f"leaves: the model has no module {name!r}")
    arguments = [one for one in signature(model.forward).parameters.values() if one.kind in _POSITIONAL]
    concrete = {one.name: one.default for one in arguments[count:] if one.default is not Parameter.empty}
    try:
        return _Tracer(leaves).trace(model, concrete_args=concrete or None)
    except Exception as error:
        raise StrettoError(
            f"{type(model).__name__} cannot be traced by torch.fx: {error}{_line_of(error)}",
            hint="the way through a forward must not depend on values; put what does into a module of its "
            "own, and name it in leaves, which takes it as one operator",
        ) from error


_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def _line_of(error: BaseException) -> str:
    """Where the user's code stopped."""
    inside = (str(Path(torch.__file__).parent), __file__)
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(inside)]
    return (
        f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno}: {frames[-1].line})" if frames else ""
    )


class _Run(fx.Interpreter):
    """One run on the meta device.

    Attributes:
        values: what each node computed; not those behind a node that failed.
    """

    def __init__(self, model: nn.Module, graph: fx.Graph, example: Sequence[Tensor], required: bool) -> None:
        super().__init__(fx.GraphModule(model, graph), garbage_collect_values=False)
        self.values = dict[fx.Node, Any]()
        self._required, self._shapes = required, [list(one.shape) for one in example]
        try:
            self.run(*example)
        except _Failed:
            if required:
                raise

    def run_node(self, n: fx.Node) -> Any:
        try:
            value = self._tried(n)
        except Exception as error:
            raise _Failed(
                f"the model fails on inputs of the shapes {self._shapes}, at {_words(n)}: {error}",
                hint="an example input as the model takes it in training",
            ) from error
        self.values[n] = value
        return value

    def _tried(self, n: fx.Node) -> Any:
        """What a node computes; modules whose way depends on values compute on random ones."""
        try:
            return super().run_node(n)
        except Exception:
            if n.op != "call_module":
                raise
        values = {one: self.values[one] for one in n.all_input_nodes}
        types = [one.dtype for one in _tensors(list(values.values())) if one.is_floating_point()]
        compute = _with_values(self.fetch_attr(str(n.target)))
        with torch.random.fork_rng([]), torch.no_grad():
            torch.manual_seed(0)
            result = _computed(compute, n, pytree.tree_map_only(Tensor, _random, values))
        return pytree.tree_map_only(
            Tensor,
            lambda one: one.to("meta", types[0] if types and one.is_floating_point() else one.dtype),
            result,
        )


class _Failed(StrettoError):
    """The model does not compute with such an input."""


def _words(node: fx.Node) -> str:
    return f"{node.target!r}" if node.op == "call_module" else f"{node.name} ({_called(node)})"


def _called(node: fx.Node) -> str:
    """The name of a function or method."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "?")


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


class _Reader:
    """One pass over the graph."""

    def __init__(
        self, model: nn.Module, graph: fx.Graph, runs: Sequence[_Run], inputs: Split, outputs: Split
    ) -> None:
        self.model, self.graph = model, graph
        self.whole, self.many, self.few = runs
        self.inputs: Split = inputs
        self.outputs: Split = outputs
        self.place = {node: at for at, node in enumerate(graph.nodes)}
        self.uses = Counter(node.target for node in graph.nodes if node.op == "call_module")
        self.operators = dict[fx.Node, Operator]()
        self.sources = dict[fx.Node, set[fx.Node]]()  # of values that are no activations, such as sizes
        self.calls = dict[str, list[str]]()  # operators by module
        self.holders = dict[int, list[str]]()  # operators by parameter
        self.notes = list[str]()

    def network(self) -> Network:
        last = list[Operator]()
        for node in self.graph.nodes:
            if node.op == "output":
                last = self._outputs(node)
            elif node.op == "get_attr":
                self._check_attribute(node)
            elif _tensors(self.whole.values[node]):
                self.operators[node] = self._operator(node)
            else:
                self.sources[node] = {read for one in node.all_input_nodes for read in self._behind(one)}
        ties = [names for names in (*self.calls.values(), *self.holders.values()) if len(names) > 1]
        unique = dict.fromkeys(tuple(dict.fromkeys(names)) for names in ties)
        return Network(
            (*self.operators.values(), *last),
            tuple(names for names in unique if len(names) > 1),
            tuple(self.notes),
        )

    def _behind(self, node: fx.Node) -> set[fx.Node]:
        """The activations that a value comes from."""
        return {node} if node in self.operators else self.sources.get(node, set())

    def _check_attribute(self, node: fx.Node) -> None:
        value = self.whole.values[node]
        if isinstance(value, nn.Parameter) or _tensors(value):
            raise StrettoError(
                f"the model's forward uses {str(node.target)!r} itself, which no style can be given to",
                hint="put the parameter or buffer and what is computed with it into a module of its own",
            )
        self.sources[node] = set()

    def _outputs(self, node: fx.Node) -> list[Operator]:
        nodes = [leaf for leaf in pytree.tree_leaves(list(node.args)) if leaf in self.operators]
        made = list[Operator]()
        for at, leaf in enumerate(dict.fromkeys(nodes)):
            source = self.operators[leaf]
            split = self.outputs if self.outputs in source.splits else "whole"
            made.append(
                Operator(
                    name="output" if at == 0 else f"output {at}",
                    kind=OUTPUT,
                    inputs=(source.name,),
                    shape=source.shape,
                    element=source.element,
                    splits=(split,),
                    gradient=source.gradient,
                )
            )
        return made

    def _operator(self, node: fx.Node) -> Operator:
        tensors = _tensors(self.whole.values[node])
        first = tensors[0]
        behind = {source for one in node.all_input_nodes for source in self._behind(one)}
        read = sorted(behind, key=self.place.__getitem__)
        common: dict[str, Any] = {
            "inputs": tuple(self.operators[one].name for one in read),
            "shape": tuple(first.shape),
            "element": sum(one.nbytes for one in tensors) // max(1, first.numel()),
            "gradient": first.is_floating_point() and any(self.operators[one].gradient for one in read),
        }
        alone = self._follows_batch(node)
        if node.op == "placeholder":
            split: Split = self.inputs if alone else "whole"
            common |= {"splits": (split,), "saved": first.nbytes, "gradient": False}
            return Operator(name=node.name, kind=INPUT, **common)
        before = [one for source in read for one in _tensors(self.whole.values[source])]
        name = str(node.target) if node.op == "call_module" else _called(node).strip("_")
        fresh = self._fresh(node, name, before, tensors)
        common["saved"] = sum(one.nbytes for one in tensors) if fresh == "new" else 0
        common["moved"] = sum(one.nbytes for one in (*before, *tensors)) if fresh else 0
        if node.op == "call_module":
            return self._module(node, common, alone)
        splits = self._splits(node, name, alone, elementwise=name in ELEMENTWISE)
        return Operator(name=f"{node.name}()", kind=name, splits=splits, **common)

    def _fresh(
        self, node: fx.Node, name: str, before: Sequence[Tensor], after: Sequence[Tensor]
    ) -> Literal["new", "in place", ""]:
        """Whether an operator makes new tensors, changes its input in place, or returns views of it."""
        storage = {one.untyped_storage()._cdata for one in before}
        if any(one.untyped_storage()._cdata not in storage for one in after):
            return "new"
        if node.op == "call_module":
            module = self.model.get_submodule(name)
            if isinstance(module, _DropoutNd | KeyedDropout):  # which returns its input in evaluation
                return "in place" if getattr(module, "inplace", False) else "new"
            changes = isinstance(module, ELEMENTWISE_MODULES) and not isinstance(module, nn.Identity)
            return "in place" if changes else ""
        return "in place" if name in ELEMENTWISE - _VIEWS else ""

    # ------------------------------------------------------------------ modules

    def _module(self, node: fx.Node, common: dict[str, Any], alone: bool) -> Operator:
        target = str(node.target)
        module = self.model.get_submodule(target)
        calls = self.calls.setdefault(target, [])
        name = target if not calls else f"{target} (call {len(calls) + 1})"
        calls.append(name)
        kind = type(module).__name__
        if isinstance(module, _DropoutNd | KeyedDropout) and module.p:
            common["saved"] += prod(common["shape"])  # the mask
        parameters = list(module.parameters())
        if not parameters:
            elementwise = isinstance(module, ELEMENTWISE_MODULES)
            splits = self._splits(node, kind, alone, elementwise=elementwise)
            return Operator(name=name, kind=kind, module=target, splits=splits, **common)
        trained = [one for one in parameters if one.requires_grad]
        known = {holder for one in parameters for holder in self.holders.get(id(one), ())}
        for one in parameters:
            self.holders.setdefault(id(one), []).append(name)
        bias = getattr(module, "bias", None)
        loose = bias.numel() if isinstance(bias, Tensor) and bias.requires_grad else 0
        total = sum(one.numel() for one in trained)
        common |= {
            "module": target,
            "repeated": self.uses[target] > 1,
            "shared": bool(known),
            "bias": loose,
            "weight": total - loose,
            "frozen": sum(one.numel() for one in parameters) - total,
            "gradient": bool(trained) or common["gradient"],
        }
        whole: tuple[Split, ...] = ("whole",)
        styles: tuple[StyleName, ...] = ("replicate",)
        if alone and (self._layer(module, common) or self._computes_alone(node, kind)):
            whole, styles = ("whole", "batch"), ("replicate", "batch")
        if type(module) is nn.Linear:
            whole, styles = (*whole, "features"), (*styles, "column", "row")
        return Operator(name=name, kind=kind, splits=whole, styles=styles, **common)

    def _layer(self, module: nn.Module, common: dict[str, Any]) -> bool:
        """Whether the module is a layer that is known to take samples alone; adds what is known of it."""
        shape = common["shape"]
        if isinstance(module, nn.Linear):
            rows = prod(shape[:-1])
            common |= {"product": Product(rows, module.in_features, module.out_features), "moved": 0}
        elif isinstance(module, _ConvTransposeNd | _ConvNd):
            area, groups = prod(module.kernel_size), module.groups
            into, out = module.in_channels // groups, module.out_channels // groups
            if isinstance(module, _ConvTransposeNd):
                stride = prod(module.stride)
                rows = max(1, shape[0] * prod(shape[2:]) // stride)
                common |= {"product": Product(rows, into, out * area, groups), "moved": 0}
            else:
                rows = shape[0] * prod(shape[2:])
                common |= {"product": Product(rows, into * area, out, groups), "moved": 0}
        elif isinstance(module, _BatchNorm):
            if module.training or not module.track_running_stats:
                common["statistics"] = module.num_features
        else:
            return isinstance(module, (*_NORMS, nn.Embedding, nn.PReLU))
        return True

    # ------------------------------------------------------------------ splits

    def _follows_batch(self, node: fx.Node) -> bool:
        """Whether dimension 0 of all that a node computes is the batch."""
        runs = (self.whole, self.many, self.few)
        if any(node not in run.values for run in runs):
            return False
        shapes = [[tuple(one.shape) for one in _tensors(run.values[node])] for run in runs]
        batches = (self._batch, _MANY, _FEW)
        return all(
            all(shape and shape[0] == count for shape, count in zip(alike, batches, strict=True))
            and len({shape[1:] for shape in alike}) == 1
            for alike in zip(*shapes, strict=True)
        )

    @property
    def _batch(self) -> int:
        first = next(node for node in self.graph.nodes if node.op == "placeholder")
        return _tensors(self.whole.values[first])[0].shape[0]

    def _splits(self, node: fx.Node, kind: str, alone: bool, *, elementwise: bool) -> tuple[Split, ...]:
        """Of an operator without parameters."""
        splits: tuple[Split, ...] = ("whole",)
        if alone and (elementwise or self._computes_alone(node, kind)):
            splits = (*splits, "batch")
        tensors = _tensors([self.whole.values[one] for one in node.all_input_nodes])
        last = {one.shape[-1] if one.dim() else 0 for one in (*tensors, *_tensors(self.whole.values[node]))}
        return (*splits, "features") if elementwise and len(last) == 1 else splits

    def _computes_alone(self, node: fx.Node, kind: str) -> bool:
        """Whether the first samples of its output depend on the first of its input only, by a trial."""
        try:
            with torch.random.fork_rng([]), torch.no_grad():
                torch.manual_seed(0)
                alone = self._tried(node)
        except Exception as error:  # whatever the user's module raises
            self.notes.append(f"{_words(node)} is replicated: it fails on random samples: {error}")
            return False
        if not alone:
            self.notes.append(f"{_words(node)} is replicated: its samples depend on one another")
        elif node.op == "call_module" and kind not in vars(nn):
            self.notes.append(f"{_words(node)} may be split by batch: it computes random samples alone")
        return alone

    def _tried(self, node: fx.Node) -> bool:
        values, fewer = dict[fx.Node, Any](), dict[fx.Node, Any]()
        for one in node.all_input_nodes:
            many = self.many.values[one]
            if sum(tensor.numel() for tensor in _tensors(many)) > _LARGEST:
                raise ValueError("its input is too large")
            values[one] = pytree.tree_map_only(Tensor, _random, many)
            fewer[one] = _rows(values[one], self.few.values[one])
        compute = self._callable(node)
        long, short = (_tensors(_computed(compute, node, some)) for some in (values, fewer))
        return all(
            torch.allclose(one[:_FEW], other, rtol=_CLOSE, atol=_CLOSE, equal_nan=True)
            for one, other in zip(long, short, strict=True)
        )

    def _callable(self, node: fx.Node) -> Callable[..., Any]:
        if node.op == "call_module":
            return _with_values(self.model.get_submodule(str(node.target)))
        if node.op == "call_method":
            name = str(node.target)
            return lambda this, *args, **named: getattr(this, name)(*args, **named)
        return cast(Callable[..., Any], node.target)


def _random(one: Tensor) -> Tensor:
    """Values for a tensor that has none; integers are indices that every table has."""
    if one.is_floating_point():
        return torch.randn(one.shape, dtype=torch.float64)
    return torch.randint(0, 2, one.shape).to(one.dtype)


def _rows(value: Any, few: Any) -> Any:
    """The first samples of a value, of the shapes that it has with few samples."""
    shorter = [
        one[: other.shape[0]]
        if isinstance(other, Tensor) and other.dim()
        else other
        if not isinstance(other, Tensor)
        else one
        for one, other in zip(pytree.tree_leaves(value), pytree.tree_leaves(few), strict=True)
    ]
    return pytree.tree_unflatten(shorter, pytree.tree_structure(few))


def _computed(compute: Callable[..., Any], node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """What the node computes of values; of copies, since it may change them."""
    copies = {one: pytree.tree_map_only(Tensor, torch.clone, value) for one, value in values.items()}
    args = map_arg(node.args, copies.__getitem__)
    named = map_arg(node.kwargs, copies.__getitem__)
    return compute(*cast("tuple[Any, ...]", args), **cast("dict[str, Any]", named))


def _with_values(module: nn.Module) -> nn.Module:
    """A copy for evaluation with random parameters; buffers keep their values where they have some."""
    copy = _without_values(module).to_empty(device="cpu").double().eval()
    with torch.no_grad():
        for parameter in copy.parameters():
            parameter.normal_(std=0.1)
        for buffer, before in zip(copy.buffers(), module.buffers(), strict=True):
            if before.is_meta:
                buffer.fill_(1)
            else:
                buffer.copy_(before)
    return copy
