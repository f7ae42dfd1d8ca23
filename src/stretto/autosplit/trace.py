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

from stretto.autosplit.network import INPUT, OUTPUT, Operator, OperatorGraph, Product, Split, StyleName
from stretto.engine.parallel.follow import ELEMENTWISE, ELEMENTWISE_MODULES
from stretto.engine.parallel.tensor.dropout import KeyedDropout
from stretto.errors import StrettoError

_MANY, _FEW = 4, 2  # samples of the trials; two, since BatchNorm refuses a single one
_LARGEST = 2**27  # elements of a trial
_CLOSE = 1e-9
_VIEWS = frozenset(("contiguous", "detach", "double", "float", "half", "to", "type", "type_as"))
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def trace_network(
    model: nn.Module,
    example: Sequence[Tensor],
    *,
    inputs: Split = "whole",
    outputs: Split = "whole",
    leaves: Iterable[str] = (),
) -> OperatorGraph:
    """Return the operators of a model, for a batch of the example's shapes.

    Neither the model nor the example is computed with or changed; both may be on the meta device.

    Args:
        example: the model's inputs, with the samples of all ranks along dimension 0.
        inputs, outputs: the splits with which every rank calls the model, and of its results, as for
            `parallelize`.
        leaves: names of modules that are taken as one operator.

    Raises:
        StrettoError: a model that cannot be traced, or that fails on such an input.
    """
    if not example or not all(isinstance(tensor, Tensor) and tensor.dim() for tensor in example):
        raise StrettoError(
            "the example input has no batch dimension", hint="a tensor such as torch.empty(256, 3, 224, 224)"
        )
    if fx.Tracer().is_leaf_module(model, ""):
        raise StrettoError(
            f"the model itself is {type(model).__name__}, and has no name by which a plan could refer to it",
            hint=f"nn.Sequential({type(model).__name__}(...))",
        )
    empty = _without_values(model)
    graph = _trace(empty, len(example), frozenset(leaves))
    empty.eval()  # nothing is drawn; the trace went the way of the model's mode
    batch = example[0].shape[0]
    runs = list[_MetaRun]()
    for count in (batch, _MANY, _FEW):
        samples = [
            torch.empty(
                (count, *tensor.shape[1:]) if tensor.shape[0] == batch else tensor.shape,
                dtype=tensor.dtype,
                device="meta",
            )
            for tensor in example
        ]
        runs.append(_MetaRun(empty, graph, samples, required=count == batch))
    return _Reader(model, graph, runs, inputs, outputs).network()


def _without_values(model: nn.Module) -> nn.Module:
    """Return a copy on the meta device; no value is copied."""
    memo = dict[int, Any]()
    for parameter in model.parameters():
        meta = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(meta, parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return deepcopy(model, memo)


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


def _trace(model: nn.Module, count: int, leaves: frozenset[str]) -> fx.Graph:
    """Trace a model of this number of inputs."""
    for name in leaves:
        if name not in dict(model.named_modules()):
            raise StrettoError(f"leaves: the model has no module {name!r}")
    parameters = signature(model.forward).parameters.values()
    others = [parameter for parameter in parameters if parameter.kind in _POSITIONAL][count:]
    concrete = {other.name: other.default for other in others if other.default is not Parameter.empty}
    try:
        return _Tracer(leaves).trace(model, concrete_args=concrete or None)
    except Exception as error:
        inside = (str(Path(torch.__file__).parent), __file__)
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if not frame.filename.startswith(inside)
        ]
        line = ""
        if frames:  # the last one of the user's code
            line = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno}: {frames[-1].line})"
        raise StrettoError(
            f"{type(model).__name__} cannot be traced by torch.fx: {error}{line}",
            hint="the way through a forward must not depend on values; put what does into a module of its "
            "own, and name it in leaves, which takes it as one operator",
        ) from error


class _RunError(StrettoError):
    """The model does not compute with such an input."""


class _MetaRun(fx.Interpreter):
    """One run on the meta device.

    Attributes:
        values: the result of each node, up to the first that failed.
    """

    def __init__(self, model: nn.Module, graph: fx.Graph, example: Sequence[Tensor], required: bool) -> None:
        super().__init__(fx.GraphModule(model, graph), garbage_collect_values=False)
        self.values = dict[fx.Node, Any]()
        self._shapes = [list(tensor.shape) for tensor in example]
        try:
            self.run(*example)
        except _RunError:
            if required:
                raise

    def run_node(self, n: fx.Node) -> Any:
        try:
            value = self._compute(n)
        except Exception as error:
            raise _RunError(
                f"the model fails on inputs of the shapes {self._shapes}, at {_described(n)}: {error}",
                hint="an example input as the model takes it in training",
            ) from error
        self.values[n] = value
        return value

    def _compute(self, n: fx.Node) -> Any:
        """Compute a node; modules whose way depends on values compute on random ones."""
        try:
            return super().run_node(n)
        except Exception:
            if n.op != "call_module":
                raise
        values = {node: self.values[node] for node in n.all_input_nodes}
        dtypes = [tensor.dtype for tensor in _tensors([*values.values()]) if tensor.is_floating_point()]
        module = _with_random_values(self.fetch_attr(str(n.target)))
        with torch.random.fork_rng([]), torch.no_grad():
            torch.manual_seed(0)
            result = _call(module, n, pytree.tree_map_only(Tensor, _random, values))

        def to_meta(tensor: Tensor) -> Tensor:
            return tensor.to("meta", dtypes[0] if dtypes and tensor.is_floating_point() else tensor.dtype)

        return pytree.tree_map_only(Tensor, to_meta, result)


def _described(node: fx.Node) -> str:
    return f"{node.target!r}" if node.op == "call_module" else f"{node.name} ({_function_name(node)})"


def _function_name(node: fx.Node) -> str:
    """Return the name of the node's function or method."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "?")


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


class _Reader:
    """One pass over the graph.

    Attributes:
        full, many, few: runs with the example's batch and with a few samples.
        sources: the activations that values other than activations come from, such as sizes.
        calls: operators by module.
        holders: operators by parameter.
    """

    def __init__(
        self, model: nn.Module, graph: fx.Graph, runs: Sequence[_MetaRun], inputs: Split, outputs: Split
    ) -> None:
        self.model, self.graph = model, graph
        self.full, self.many, self.few = runs
        self.inputs: Split = inputs
        self.outputs: Split = outputs
        self.index = {node: i for i, node in enumerate(graph.nodes)}
        self.uses = Counter(node.target for node in graph.nodes if node.op == "call_module")
        self.operators = dict[fx.Node, Operator]()
        self.sources = dict[fx.Node, set[fx.Node]]()
        self.calls = dict[str, list[str]]()
        self.holders = dict[int, list[str]]()
        self.notes = list[str]()

    def network(self) -> OperatorGraph:
        results = list[Operator]()
        for node in self.graph.nodes:
            if node.op == "output":
                leaves = [leaf for leaf in pytree.tree_leaves(list(node.args)) if leaf in self.operators]
                outputs = list[Operator]()
                for number, leaf in enumerate(dict.fromkeys(leaves)):
                    source = self.operators[leaf]
                    split = self.outputs if self.outputs in source.splits else "whole"
                    outputs.append(
                        Operator(
                            name=f"output {number}" if number else "output",
                            kind=OUTPUT,
                            inputs=(source.name,),
                            shape=source.shape,
                            element=source.element,
                            splits=(split,),
                            gradient=source.gradient,
                        )
                    )
                results = outputs
                continue
            tensors = _tensors(self.full.values[node])
            if node.op == "get_attr":
                if tensors:
                    raise StrettoError(
                        f"the model's forward uses {str(node.target)!r} itself, which no style can be given "
                        "to",
                        hint="put the parameter or buffer and what is computed with it into a module of its "
                        "own",
                    )
                self.sources[node] = set()
            elif tensors:
                self.operators[node] = self._operator(node, tensors)
            else:
                self.sources[node] = self._sources(node)
        ties = [names for names in (*self.calls.values(), *self.holders.values()) if len(names) > 1]
        unique = dict.fromkeys(tuple(dict.fromkeys(names)) for names in ties)
        return OperatorGraph(
            (*self.operators.values(), *results),
            tuple(names for names in unique if len(names) > 1),
            tuple(self.notes),
        )

    def _sources(self, node: fx.Node) -> set[fx.Node]:
        """Return the activations that the inputs of a node are or come from."""
        sources = set[fx.Node]()
        for source in node.all_input_nodes:
            sources |= {source} if source in self.operators else self.sources.get(source, set())
        return sources

    def _operator(self, node: fx.Node, tensors: Sequence[Tensor]) -> Operator:
        """Return the operator of a node whose result is these tensors."""
        result = tensors[0]
        sources = sorted(self._sources(node), key=self.index.__getitem__)
        read = [self.operators[source] for source in sources]
        fields: dict[str, Any] = {
            "inputs": tuple(operator.name for operator in read),
            "shape": tuple(result.shape),
            "element": sum(tensor.nbytes for tensor in tensors) // max(1, result.numel()),
            "gradient": result.is_floating_point() and any(operator.gradient for operator in read),
        }
        by_batch = self._follows_batch(node)
        if node.op == "placeholder":
            split: Split = self.inputs if by_batch else "whole"
            fields |= {"splits": (split,), "saved": result.nbytes, "gradient": False}
            return Operator(name=node.name, kind=INPUT, **fields)
        before = [tensor for source in sources for tensor in _tensors(self.full.values[source])]
        name = str(node.target) if node.op == "call_module" else _function_name(node).strip("_")
        storage = self._storage(node, name, before, tensors)
        fields["saved"] = sum(tensor.nbytes for tensor in tensors) if storage == "new" else 0
        fields["moved"] = sum(tensor.nbytes for tensor in (*before, *tensors)) if storage else 0
        if node.op == "call_module":
            return self._module_call(node, fields, by_batch)
        splits = self._splits(node, name, by_batch, elementwise=name in ELEMENTWISE)
        return Operator(name=f"{node.name}()", kind=name, splits=splits, **fields)

    def _storage(
        self, node: fx.Node, name: str, before: Sequence[Tensor], after: Sequence[Tensor]
    ) -> Literal["new", "in place", ""]:
        """Return whether an operator makes new tensors, changes its input in place, or returns views."""
        storages = {tensor.untyped_storage()._cdata for tensor in before}
        if any(tensor.untyped_storage()._cdata not in storages for tensor in after):
            return "new"
        if node.op == "call_module":
            module = self.model.get_submodule(name)
            if isinstance(module, _DropoutNd | KeyedDropout):  # which returns its input in evaluation
                return "in place" if getattr(module, "inplace", False) else "new"
            changes = isinstance(module, ELEMENTWISE_MODULES) and not isinstance(module, nn.Identity)
            return "in place" if changes else ""
        return "in place" if name in ELEMENTWISE - _VIEWS else ""

    # ------------------------------------------------------------------ modules

    def _module_call(self, node: fx.Node, fields: dict[str, Any], by_batch: bool) -> Operator:
        target = str(node.target)
        module = self.model.get_submodule(target)
        calls = self.calls.setdefault(target, [])
        name = target if not calls else f"{target} (call {len(calls) + 1})"
        calls.append(name)
        kind = type(module).__name__
        if isinstance(module, _DropoutNd | KeyedDropout) and module.p:
            fields["saved"] += prod(fields["shape"])  # the mask
        parameters = list(module.parameters())
        if not parameters:
            elementwise = isinstance(module, ELEMENTWISE_MODULES)
            splits = self._splits(node, kind, by_batch, elementwise=elementwise)
            return Operator(name=name, kind=kind, module=target, splits=splits, **fields)
        fields["shared"] = any(id(parameter) in self.holders for parameter in parameters)
        for parameter in parameters:
            self.holders.setdefault(id(parameter), []).append(name)
        bias = getattr(module, "bias", None)
        loose = bias.numel() if isinstance(bias, Tensor) and bias.requires_grad else 0
        trained = [parameter.numel() for parameter in parameters if parameter.requires_grad]
        fields |= {
            "module": target,
            "repeated": self.uses[target] > 1,
            "bias": loose,
            "weight": sum(trained) - loose,
            "frozen": sum(parameter.numel() for parameter in parameters) - sum(trained),
            "gradient": bool(trained) or fields["gradient"],
        }
        splits: tuple[Split, ...] = ("whole",)
        styles: tuple[StyleName, ...] = ("replicate",)
        if by_batch and (self._is_known_layer(module, fields) or self._computes_alone(node, kind)):
            splits, styles = ("whole", "batch"), ("replicate", "batch")
        if type(module) is nn.Linear:
            splits, styles = (*splits, "features"), (*styles, "column", "row")
        return Operator(name=name, kind=kind, splits=splits, styles=styles, **fields)

    def _is_known_layer(self, module: nn.Module, fields: dict[str, Any]) -> bool:
        """Return whether the module is a layer that computes samples alone; if so, add its product or its
        statistics to the fields.
        """
        shape = fields["shape"]
        if isinstance(module, nn.Linear):
            rows = prod(shape[:-1])
            fields |= {"product": Product(rows, module.in_features, module.out_features), "moved": 0}
        elif isinstance(module, _ConvTransposeNd | _ConvNd):
            area, groups = prod(module.kernel_size), module.groups
            inner, columns = module.in_channels // groups, module.out_channels // groups
            rows = shape[0] * prod(shape[2:])
            if isinstance(module, _ConvTransposeNd):
                rows, columns = max(1, rows // prod(module.stride)), columns * area
            else:
                inner *= area
            fields |= {"product": Product(rows, inner, columns, groups), "moved": 0}
        elif isinstance(module, _BatchNorm):
            if module.training or not module.track_running_stats:
                fields["statistics"] = module.num_features
        else:
            return isinstance(module, (*_NORMS, nn.Embedding, nn.PReLU))
        return True

    # ------------------------------------------------------------------ splits

    def _follows_batch(self, node: fx.Node) -> bool:
        """Return whether dimension 0 of all results of a node is the batch."""
        runs = (self.full, self.many, self.few)
        if any(node not in run.values for run in runs):
            return False
        placeholder = next(node for node in self.graph.nodes if node.op == "placeholder")
        batch = _tensors(self.full.values[placeholder])[0].shape[0]
        shapes = [[tuple(tensor.shape) for tensor in _tensors(run.values[node])] for run in runs]
        return all(
            all(
                shape and shape[0] == count for shape, count in zip(result, (batch, _MANY, _FEW), strict=True)
            )
            and len({shape[1:] for shape in result}) == 1
            for result in zip(*shapes, strict=True)
        )

    def _splits(self, node: fx.Node, kind: str, by_batch: bool, *, elementwise: bool) -> tuple[Split, ...]:
        """Return the splits of an operator without parameters."""
        splits: tuple[Split, ...] = ("whole",)
        if by_batch and (elementwise or self._computes_alone(node, kind)):
            splits = (*splits, "batch")
        tensors = _tensors([self.full.values[other] for other in (*node.all_input_nodes, node)])
        widths = {tensor.shape[-1] if tensor.dim() else 0 for tensor in tensors}
        return (*splits, "features") if elementwise and len(widths) == 1 else splits

    def _computes_alone(self, node: fx.Node, kind: str) -> bool:
        """Return whether the first samples of a node's output depend on the first of its input only, by a
        trial.
        """
        try:
            with torch.random.fork_rng([]), torch.no_grad():
                torch.manual_seed(0)
                values, fewer = dict[fx.Node, Any](), dict[fx.Node, Any]()
                for source in node.all_input_nodes:
                    many = self.many.values[source]
                    if sum(tensor.numel() for tensor in _tensors(many)) > _LARGEST:
                        raise ValueError("its input is too large")
                    values[source] = pytree.tree_map_only(Tensor, _random, many)
                    value = values[source]
                    few = self.few.values[source]
                    leaves = list[Any]()
                    for leaf, other in zip(pytree.tree_leaves(value), pytree.tree_leaves(few), strict=True):
                        if not isinstance(other, Tensor):
                            leaf = other
                        elif other.dim():
                            leaf = leaf[: other.shape[0]]
                        leaves.append(leaf)
                    fewer[source] = pytree.tree_unflatten(leaves, pytree.tree_structure(few))
                if node.op == "call_module":
                    function: Callable[..., Any] = _with_random_values(
                        self.model.get_submodule(str(node.target))
                    )
                elif node.op == "call_method":
                    name = str(node.target)
                    function = lambda this, *args, **named: getattr(this, name)(*args, **named)  # noqa: E731
                else:
                    function = cast(Callable[..., Any], node.target)
                results, first = (_tensors(_call(function, node, inputs)) for inputs in (values, fewer))
                alone = all(
                    torch.allclose(result[:_FEW], other, rtol=_CLOSE, atol=_CLOSE, equal_nan=True)
                    for result, other in zip(results, first, strict=True)
                )
        except Exception as error:  # whatever the user's module raises
            self.notes.append(f"{_described(node)} is replicated: it fails on random samples: {error}")
            return False
        if not alone:
            self.notes.append(f"{_described(node)} is replicated: its samples depend on one another")
        elif node.op == "call_module" and kind not in vars(nn):
            self.notes.append(f"{_described(node)} may be split by batch: it computes random samples alone")
        return alone


def _random(tensor: Tensor) -> Tensor:
    """Return values for a tensor that has none; integers are indices that every table has."""
    if tensor.is_floating_point():
        return torch.randn(tensor.shape, dtype=torch.float64)
    return torch.randint(0, 2, tensor.shape).to(tensor.dtype)


def _call(function: Callable[..., Any], node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """Return the result of the node; of copies of the values, since it may change them."""
    copies = {source: pytree.tree_map_only(Tensor, torch.clone, value) for source, value in values.items()}
    args = map_arg(node.args, copies.__getitem__)
    named = map_arg(node.kwargs, copies.__getitem__)
    return function(*cast("tuple[Any, ...]", args), **cast("dict[str, Any]", named))


def _with_random_values(module: nn.Module) -> nn.Module:
    """Return a copy for evaluation with random parameters; buffers keep their values if they have some."""
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
