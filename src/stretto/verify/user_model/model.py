"""Prove that any parallel model trains as its plain model does in one process."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stretto.engine.parallel.control import gather_json, run_on_all, this_rank, world_size
from stretto.errors import StrettoError, nearest
from stretto.verify.axes import Axes, Grid
from stretto.verify.compare import (
    Comparison,
    Pairs,
    Quantity,
    Snapshot,
    relative,
    rounding_bounds,
    worst_quantities,
)
from stretto.verify.compare import share as broadcast
from stretto.verify.diagnose import explain
from stretto.verify.evidence import FACTOR_TOLERANCE, Cause, Evidence, RankValues, above, listing
from stretto.verify.holdings import Holdings, Names, PlainNames, Rule, modules_in
from stretto.verify.outputs import Outputs, recorded
from stretto.verify.user_model.report import Report
from stretto.verify.user_model.step import (
    Loss,
    Observation,
    PlainRun,
    Step,
    converted,
    float64_copy,
    parameter_states,
    watch,
    without_dropout,
)
from stretto.verify.user_model.waits import bounded_waits

Reduction = Literal["mean", "sum", "same"]
Optimizers = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
# by plain name; several where a rank holds a parameter in several places
FullTensors = dict[str, list[Tensor]]


def prove(
    plain: Callable[[], Any],
    parallel: Callable[[nn.Module], Any],
    batch: Any,
    step: Step,
    *,
    loss: Loss | None = None,
    optimizer: Optimizers | None = None,
    clip: float | None = None,
    share: Callable[[Any, int], Any] | None = None,
    steps: int = 2,
    dtype: torch.dtype = torch.float64,
    reduction: Reduction = "mean",
    mesh: Grid = None,
    gather: Mapping[str, Rule] | None = None,
    names: Names | None = None,
    initial: str = "check",
    timeout: float = 60.0,
) -> Report:
    """Train a parallel model beside its plain model for a few steps, and compare everything. Collective over
    the default process group, or in one process without one.

    Every rank trains the plain model on the whole batch, and the parallel one with the user's own step. Loss,
    gradients, gradient norm, updated weights, optimizer states and buffers are compared, and for a difference
    the report names the parameter, the first module whose output differs, and the likeliest cause.

    Args:
        plain: builds the plain model, or (model, optimizer). Rank 0's values are those of all ranks.
        parallel: makes this rank's parallel model of a copy of the plain one that it may change, or of models
            of its own. It returns a module, a stage or schedule of torch.distributed.pipelining, a DeepSpeed
            engine, or a list of them; or (that, optimizer), or (that, a list of optimizers).
        batch: the global batch, in tensors, mappings and sequences of them; or a function of the step.
        step: `step(model, optimizer, batch)`, a whole training step: forward, backward, clipping, update and
            emptying of gradients. `model` is what `parallel` returned. It returns the loss, or (loss,
            gradient norm); a rank without the loss, as of an earlier stage, returns None.
        loss: `loss(model, batch)`, the mean loss of the plain model over the global batch. None: the plain
            model is trained by `step` too.
        optimizer: builds an optimizer of a list of parameters; None: AdamW with a rate of 1e-3.
        clip: largest gradient norm in the plain model's step, for a `step` that clips by code of its own;
            None: the bound of torch's `clip_grad_norm_` in `step`, if it is called.
        share: `share(batch, rank)`, what of the batch `step` is handed; None: the whole.
        steps: training steps; two, so that the optimizer's states and the emptied gradients are used too.
        dtype: of both models. With one below float64, an error may be MULTIPLE times that of the plain model
            in the same type, measured against the plain model in float64.
        reduction: how ranks' losses make that of the batch: "mean" or "sum" of them, or "same": each is it.
        mesh: the ranks' axes, to name them in a cause: a DeviceMesh, or sizes such as {"dp": 2, "tp": 2} with
            the last axis varying fastest.
        gather: what makes parameters whole that are split other than as DTensors: a Split, or a function of
            the local tensor, by patterns of names such as {"*.up.weight": Split(0)}. Tensor-parallel
            parameters of Megatron-core are known.
        names: names of parameters in the plain model by their names in the parallel one, with `*` for any
            text on both sides, or a function of the name; needed where a model of other names was built.
        initial: "check" that the parallel model begins with the plain one's values, or "load" them into it.
        timeout: seconds after which a collective that not all ranks take part in is an error, and a message
            from rank to rank that does not come.

    Raises:
        StrettoError: on every rank: a parameter that nothing names or makes whole, or other bad arguments.
    """
    _check(dtype, reduction, initial)
    with bounded_waits(timeout):
        proof = _Proof(
            make_plain=plain,
            step=step,
            loss=loss,
            make_optimizer=optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)),
            clip=clip,
            share=share,
            dtype=dtype,
            reduction=reduction,
        )
        proof.build(parallel, mesh, gather or {}, names, load=initial == "load", timeout=timeout)
        return proof.run(batch, steps)


@dataclass(kw_only=True)
class _Proof:
    """The two models, and their steps; the arguments are those of `prove`."""

    make_plain: Callable[[], Any]
    step: Step
    loss: Loss | None
    make_optimizer: Optimizers
    clip: float | None
    share: Callable[[Any, int], Any] | None
    dtype: torch.dtype
    reduction: Reduction
    notes: list[str] = field(default_factory=list[str])

    def build(
        self,
        parallel: Callable[[nn.Module], Any],
        mesh: Grid,
        gather: Mapping[str, Rule],
        names: Names | None,
        load: bool,
        timeout: float,
    ) -> None:
        """Build the plain model, in float64 too, and the parallel one of a copy."""
        self.started = time.perf_counter()
        _set_timeout(timeout)
        self.axes = Axes(mesh)
        start = run_on_all(lambda: self._build(self.dtype, None))
        self.weights = {name: float64_copy(tensor) for name, tensor in start.model.state_dict().items()}
        exact = self.dtype == torch.float64
        self.exact = start if exact else self._build(torch.float64, self.weights)
        self.rounded = None if exact else start
        handed = copy.deepcopy(start.model)
        self.names = PlainNames.of(start.model, handed)
        self.built, optimizers = _pair(parallel(handed))
        _set_timeout(timeout)  # of the groups that `parallel` has made
        modules = run_on_all(lambda: modules_in(self.built))
        without_dropout(modules)
        self.holdings = run_on_all(lambda: Holdings(modules, self.names, gather, names))
        self.holdings.check_complete()
        if load:
            run_on_all(self._load)
        if optimizers is None and not type(self.built).__module__.startswith("deepspeed."):
            optimizers = self.make_optimizer(
                [parameter for module in modules for parameter in module.parameters()]
            )
        self.optimizers = _listed(optimizers)
        self.modules = dict(self.exact.model.named_modules())

    def _build(self, dtype: torch.dtype, values: Mapping[str, Tensor] | None) -> PlainRun:
        """A plain model with rank 0's values, or with these."""
        model, optimizers = _pair(self.make_plain())
        if not isinstance(model, nn.Module):
            raise StrettoError(
                f"plain() returned {type(model).__name__}",
                hint="return the plain nn.Module, or (module, optimizer)",
            )
        model.to(_device(), dtype)
        if dropped := without_dropout([model]):
            note = f"dropout is 0 in {dropped} module{'s' * (dropped > 1)}: no two layouts share its masks"
            self.notes[:] = [note]
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                value = broadcast(tensor.detach(), tuple(tensor.shape)) if values is None else values[name]
                tensor.copy_(value.to(tensor.device))
        if optimizers is None:
            optimizers = self.make_optimizer(list(model.parameters()))
        return PlainRun(model, _listed(optimizers), self.loss, self.step)

    def _load(self) -> None:
        for entry in (*self.holdings.parameters, *self.holdings.buffers):
            entry.load(self.weights[entry.name])

    # ------------------------------------------------------------------ steps

    def run(self, batch: Any, steps: int) -> Report:
        """Make steps until one differs."""
        if steps < 1:
            raise StrettoError(
                f"steps is {steps}, must be at least 1", hint="2, which use optimizer states too"
            )
        quantities, done = list[list[Quantity]](), 0
        weights = self._full_tensors({entry.key: entry.tensor for entry in self.holdings.parameters})
        expected = {name: self.weights[name] for name in self.names.parameters}
        initial = _compared("weights", weights, Snapshot(loss=0.0, norm=0.0, gradients={}, weights=expected))
        cause = None
        if wrong := above(initial.errors):
            cause = Cause(
                f"{listing(wrong)} begin{'s' * (len(wrong) == 1)} with other values than in the plain model: "
                "build the parallel model of the one that parallel() is handed, or give initial='load'"
            )
        while cause is None and done < steps:
            evidence = self._step(batch(done) if callable(batch) else batch, done)
            quantities.append(evidence.quantities(*QUANTITIES))
            cause = explain(evidence)
            done += 1
        return Report(
            ranks=world_size(),
            steps=done,
            dtype=str(self.dtype).removeprefix("torch."),
            quantities=worst_quantities(quantities),
            diagnosis=None if cause is None else cause.sentence,
            first_module=None if cause is None else cause.module,
            notes=tuple(self.notes),
            seconds=time.perf_counter() - self.started,
        )

    def _step(self, batch: Any, number: int) -> Evidence:
        """One step of both models."""
        first = number == 0
        local_batch = batch if self.share is None else self.share(batch, this_rank())
        shares = None
        if self.share is not None and self.loss is not None:
            shares = partial(_gradients, copy.deepcopy(self.exact.model), self.loss, self._cast(local_batch))
        with recorded(self._named(self.holdings.paths) if first else []) as outputs:
            inputs, optimizers = self._cast(local_batch, self.dtype), self.optimizers
            observation = watch(self.step, self.built, optimizers, inputs, self.holdings.parameters)
        clip = self.clip if self.clip is not None else _first(gather_json(observation.clip))
        with recorded(self._named(self.exact.model.named_modules()) if first else []) as expected_outputs:
            expected = self.exact.run(self._cast(batch), clip)
        rounded = None
        if self.rounded is not None:
            rounded = self.rounded.run(self._cast(batch, self.dtype), clip)
        losses, norms = gather_json(observation.loss), gather_json(observation.norm)
        if first and _first(losses) is None:
            self.notes.append(_NO_LOSS)
        if not any(bool(gradient.any()) for gradient in expected.gradients.values()):
            raise StrettoError(
                f"no gradient of the plain model differs from 0 in step {number + 1}, so none is compared",
                hint="see whether loss() depends on the parameters, and step() calls backward",
            )
        if first and self._is_repeated(outputs, expected_outputs):
            self.notes.append(_REPEATED)
        gradients = self._gradients(observation, expected, clip)
        weights = self._full_tensors({entry.key: entry.tensor for entry in self.holdings.parameters})
        buffers: FullTensors = {}
        for entry in self.holdings.buffers:
            buffers.setdefault(entry.name, []).append(entry.full_tensor(entry.tensor))
        states = self._states()
        comparable = any(gather_json(bool(states)))
        bounds = _bounds(expected, rounded, self.dtype)
        return Evidence(
            loss=_reduced(losses, self.reduction, expected.loss),
            reference_loss=expected.loss,
            gradients=_compared("gradients", gradients, expected),
            norm=_farthest(norms, expected.norm),
            reference_norm=expected.norm,
            weights=_compared("weights", weights, expected),
            states=_compared("states", states, expected) if comparable and expected.states else None,
            buffers=_compared("buffers", buffers, expected) if expected.buffers else None,
            bounds=bounds,
            close=min(0.1, max(FACTOR_TOLERANCE, *bounds.get("gradients", {}).values(), 0.0)),
            updated=all(gather_json(observation.updated)),
            clip=clip,
            tied=self.names.tied,
            values=RankValues(
                axes=self.axes,
                losses=losses,
                norms=norms,
                actual=gradients,
                expected=expected.gradients,
                share_gradients=shares,
                modules=self.modules,
                initial=self.weights,
                outputs=_on_cpu(outputs, list(expected_outputs)),
                expected_outputs={name: float64_copy(output) for name, output in expected_outputs.items()},
            ),
        )

    def _is_repeated(self, outputs: Outputs, expected: Outputs) -> bool:
        """True if each of several ranks computes the whole batch with all parameters. Collective."""
        alone = not any(entry.is_shared for entry in self.holdings.parameters)
        alone &= {entry.name for entry in self.holdings.parameters} >= set(self.names.parameters)
        alone &= bool(outputs) and all(
            torch.equal(float64_copy(output), float64_copy(expected[name]))
            for name, output in outputs.items()
            if name in expected
        )
        return world_size() > 1 and all(gather_json(alone))

    def _cast(self, batch: Any, dtype: torch.dtype = torch.float64) -> Any:
        return converted(batch, _device(), dtype)

    def _named(self, modules: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
        """Modules to record: those of the plain model, and the whole of it under a name."""
        plain_modules = {id(module) for _, module in self.names.modules.values()}
        roots = {id(self.exact.model), *([id(self.built)] if isinstance(self.built, nn.Module) else [])}
        return [(path or FULL_MODEL, m) for path, m in modules if path or id(m) in plain_modules | roots]

    def _gradients(self, observation: Observation, expected: Snapshot, clip: float | None) -> FullTensors:
        """Whole gradients before clipping; zeros where there is none but should be. Collective."""
        has: list[dict[str, bool]] = gather_json(
            {entry.name: observation.gradients[entry.key] is not None for entry in self.holdings.parameters}
        )
        due = {name for rank in has for name, present in rank.items() if present} | expected.gradients.keys()
        factor = 1.0
        # clipped by code of the user's
        if self.loss is not None and clip is not None and observation.clip is None:
            norm = expected.norm if observation.norm is None else observation.norm
            factor = max(1.0, (norm + _CLIP_EPS) / clip)
        local = dict[int, Tensor]()
        for entry in self.holdings.parameters:
            if entry.name in due:
                gradient = observation.gradients[entry.key]
                local[entry.key] = torch.zeros_like(entry.tensor) if gradient is None else gradient * factor
        return self._full_tensors(local)

    def _full_tensors(self, values: Mapping[int, Tensor]) -> FullTensors:
        """Tensors that lie as the parameters do, made whole. Collective."""
        tensors: FullTensors = {}
        for entry in self.holdings.parameters:
            if entry.key in values:
                tensors.setdefault(entry.name, []).append(entry.full_tensor(values[entry.key]))
        return tensors

    def _states(self) -> FullTensors:
        """The optimizers' states, made whole; of parameters that ranks share, where all of them have them.
        Collective.
        """
        local_states = {
            entry.key: parameter_states(entry, self.optimizers) for entry in self.holdings.parameters
        }
        kinds: list[dict[str, list[str]]] = gather_json(
            {entry.name: sorted(local_states[entry.key]) for entry in self.holdings.parameters}
        )
        states: FullTensors = {}
        for entry in self.holdings.parameters:
            keys = set(local_states[entry.key])
            if entry.is_shared:
                keys = keys.intersection(*(rank[entry.name] for rank in kinds if entry.name in rank))
            for key in sorted(keys):
                state = entry.full_tensor(local_states[entry.key][key])
                states.setdefault(f"{entry.name}.{key}", []).append(state)
        return states


QUANTITIES = ("loss", "gradients", "norm", "weights", "states", "buffers")
FULL_MODEL = "the whole model"
_NO_LOSS = "step() returned no loss, so it was not compared"
_REPEATED = (
    "every rank computes the whole batch with the whole model, so a missing reduction would not show: "
    "give share= if ranks are to have parts of the batch"
)
_CLIP_EPS = 1e-6  # that torch's clipping adds to a norm


def _gradients(model: nn.Module, loss: Loss, batch: Any) -> dict[str, Tensor]:
    """The gradients of a model's loss."""
    model.zero_grad()
    loss(model, batch).backward()
    return {name: float64_copy(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def _compared(quantity: str, tensors: FullTensors, expected: Snapshot) -> Comparison:
    """Relative errors of full tensors over all ranks. Collective."""
    references: Mapping[str, Tensor] = getattr(expected, quantity)

    def pair() -> dict[str, Pairs]:
        for name, full in tensors.items():
            wrong = [
                tensor for tensor in full if name in references and tensor.shape != references[name].shape
            ]
            if wrong:
                shapes = f"{list(wrong[0].shape)}, and {list(references[name].shape)} in the plain model"
                raise StrettoError(
                    f"{name} made whole is {shapes}", hint="see its rule in gather: dim, group and parts"
                )
        return {
            n: [(tensor, references[n]) for tensor in full] for n, full in tensors.items() if n in references
        }

    return expected.compare(quantity, run_on_all(pair))


def _bounds(expected: Snapshot, rounded: Snapshot | None, dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """What errors may be, by quantity and name; TOLERANCE for all others."""
    if rounded is None:
        return {}
    eps, bounds = torch.finfo(dtype).eps, dict[str, dict[str, float]]()
    for quantity in ("gradients", "weights", "states", "buffers"):
        other: Mapping[str, Tensor] = getattr(rounded, quantity)
        exact: Mapping[str, Tensor] = getattr(expected, quantity)
        scales = expected.scales(quantity)
        errors = {name: float((other[name] - exact[name]).abs().max()) / scales[name] for name in exact}
        bounds[quantity] = rounding_bounds(errors, eps)
    for quantity in ("loss", "norm"):
        error = relative(getattr(rounded, quantity), getattr(expected, quantity))
        bounds[quantity] = rounding_bounds({"": error}, eps)
    return bounds


def _on_cpu(outputs: Outputs, order: Sequence[str]) -> Outputs:
    """Return outputs in float64 on the CPU, distributed tensors as full ones if all ranks of their mesh have
    them. Collective.
    """
    meshes = {n: t.device_mesh.mesh.flatten().tolist() for n, t in outputs.items() if isinstance(t, DTensor)}
    everywhere: list[dict[str, list[int]]] = gather_json(meshes)
    brought = Outputs()
    for name in order:
        if name not in outputs:
            continue
        output = outputs[name]
        if isinstance(output, DTensor):
            if any(name not in everywhere[rank] for rank in meshes[name]):
                continue
            output = output.full_tensor()
        brought[name] = float64_copy(output)
    return brought


# ------------------------------------------------------------------ arguments


def _check(dtype: torch.dtype, reduction: str, initial: str) -> None:
    for argument, value, allowed in (
        ("reduction", reduction, get_args(Reduction)),
        ("initial", initial, ("check", "load")),
    ):
        if value not in allowed:
            suggestion = nearest(str(value), allowed)
            raise StrettoError(
                f"{argument} is {value!r}",
                hint=f"did you mean {suggestion!r}?" if suggestion else " or ".join(allowed),
            )
    if not dtype.is_floating_point:
        raise StrettoError(f"dtype is {dtype}", hint="torch.float64, torch.float32 or torch.bfloat16")


def _pair(built: Any) -> tuple[Any, Any]:
    """Return what was built, and its optimizers if they came with it."""
    if isinstance(built, tuple) and len(cast(Any, built)) == 2:
        first, second = cast(tuple[Any, Any], built)
        if _is_optimizer(second) or (isinstance(second, list) and all(map(_is_optimizer, cast(Any, second)))):
            return first, second
    return built, None


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, torch.optim.Optimizer)


def _listed(optimizers: Any) -> list[torch.optim.Optimizer]:
    if optimizers is None:
        return []
    return cast(Any, optimizers if isinstance(optimizers, list) else [optimizers])


def _device() -> torch.device:
    """Return the device of training: this rank's accelerator, unless ranks communicate by gloo."""
    if dist.is_initialized() and "gloo" in dist.get_backend():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if accelerator is None else torch.device(accelerator.type)


def _set_timeout(seconds: float) -> None:
    """Bound the time that collectives of all groups wait for ranks that do not take part."""
    if dist.is_initialized():
        c10d: Any = dist.distributed_c10d
        for group in list(c10d._world.pg_map):
            c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def _first(values: Sequence[float | None]) -> float | None:
    return next((value for value in values if value is not None), None)


def _reduced(losses: Sequence[float | None], reduction: Reduction, reference: float) -> float | None:
    """The loss of the batch by the losses of the ranks that have one."""
    reported = [loss for loss in losses if loss is not None]
    if reduction == "same":
        return _farthest(losses, reference)
    return sum(reported) / (len(reported) if reduction == "mean" else 1) if reported else None


def _farthest(norms: Sequence[float | None], reference: float) -> float | None:
    reported = [norm for norm in norms if norm is not None]
    return max(reported, key=lambda norm: relative(norm, reference)) if reported else None
