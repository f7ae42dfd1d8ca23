"""A model cut into stages over pipeline ranks, and its training step: any list of modules, any schedule."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from stretto.engine.device import moved
from stretto.engine.parallel.data.stage_weights import ReplicatedWeights, StageWeights
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.parallel.tensor.linear import convert_linears
from stretto.engine.pipeline.exchange import Transfer
from stretto.engine.pipeline.executor import Enter, Executor, ExecutorInputs
from stretto.engine.pipeline.graphs import check_capturable
from stretto.engine.pipeline.probe import probe_boundaries
from stretto.engine.pipeline.rank_buffers import Batch, Boundaries, Boundary
from stretto.engine.pipeline.recorder import REDUCTIONS, Recorder
from stretto.engine.pipeline.shared import PartialGradient, SharedGradients, Tie, find_ties, sum_partial
from stretto.engine.pipeline.skips import Skip, Stage, check_skips
from stretto.engine.pipeline.steady_state import SteadyState, once, repeated
from stretto.engine.pipeline.versions import WeightVersions
from stretto.errors import StrettoError
from stretto.layout.cut import cut as even_cut
from stretto.program.action import Action, ActionKind
from stretto.program.checks.check import check
from stretto.program.lower import LOOKAHEAD, lower
from stretto.program.program import Program


def forward_only(program: Program, microbatches: int) -> Program:
    """Return a program of only the forwards, for any number of microbatches, in an order that always
    completes. If the program has several copies of the model, the first is used.
    """
    orders = tuple(
        tuple(
            Action(s, ActionKind.F, i)
            for i in range(microbatches)
            for s in program.stages_of(rank)
            if s < program.depth
        )
        for rank in range(program.ranks)
    )
    return replace(
        program,
        name="forward-only",
        microbatches=microbatches,
        orders=orders,
        tied=(),
        lowered=False,
        trains=False,
        pairs=frozenset(),
        versions=(),
    )


def check_cut(cut: Sequence[range], layers: int, stages: int) -> None:
    """Check that every layer is in exactly one stage, in order; raises StrettoError otherwise."""
    if len(cut) != stages or [layer for stage in cut for layer in stage] != list(range(layers)):
        raise StrettoError(
            f"cut {[(stage.start, stage.stop) for stage in cut]} of {layers} layers into {stages} stages",
            hint=f"give {stages} consecutive ranges that cover layers 0 to {layers - 1}",
        )


def check_asynchronous(program: Program, optimizer: bool, tied: Sequence[tuple[int, ...]]) -> None:
    """Check that the pipeline has an optimiser if and only if the program is asynchronous, and that no stages
    of an asynchronous program share a parameter.

    Args:
        optimizer: the pipeline has an optimiser.
        tied: sets of stages that share a parameter.
    """
    if program.versions and not optimizer:
        raise StrettoError(
            f"schedule {program.name} updates weights within the step, but the pipeline has no optimizer",
            hint="give it one: Pipeline(..., weights=ReplicatedWeights(optimizer=lambda p: "
            "torch.optim.SGD(p, lr=0.1)))",
        )
    if optimizer and not program.versions:
        raise StrettoError(
            f"schedule {program.name} updates weights after the step, but the pipeline has an optimizer",
            hint="leave optimizer out and call an optimizer after step()",
        )
    if program.versions and tied:
        raise StrettoError(
            f"schedule {program.name} updates each stage separately, but stages {tied[0]} share a parameter",
            hint="untie it, or use a schedule that updates at the end, such as 1f1b",
        )


def parameter_counts(layers: Sequence[nn.Module]) -> list[float]:
    """Return the cost of each layer for an even cut: 1 + its number of parameters."""
    return [1.0 + sum(p.numel() for p in layer.parameters()) for layer in layers]


Loss = Callable[[Any, Any], Tensor]
Scale = Tensor | float | Sequence[float] | None


class Pipeline:
    """One rank's part of a model, trained by a program.

    Args:
        layers: the model in order. Each layer's result is the next layer's argument; a tuple is passed as
            several arguments. Layers of other ranks are not used and may stay on the meta device. Under a
            program that splits backwards, every nn.Linear of this rank defers its weight gradient
            (`parallel.tensor.linear.convert_linears`).
        program: program of one step, from `stretto.program`; its ranks are the mesh's pp.
        window: returns the same asynchronous schedule over a number of steps; with it, steps may follow one
            another without a drain (`advance`).
        mesh: process groups. Every pipeline of the mesh runs the same program on its own data.
        loss: maps (output of the last layer, target) to a scalar, summed over the microbatch; or a
            `LayerLoss`.
        weights: owner of the parameters of this rank's stages, which gathers and releases them, reduces their
            gradients and, with an asynchronous schedule, updates them. By default `ReplicatedWeights`.
        cut: layers of each stage; by default cut evenly by parameter count.
        skips: outputs that are also passed to a later layer.
        ties: shared parameters. By default they are detected by identity, which is lost when layers leave the
            meta device.
        partial: slices whose gradients several tensor-parallel ranks share.
        boundary: shape and dtype of the activations between stages, if all are alike, or of the inputs of
            each stage of the model but the first, by stage; by default a trial forward determines them.
        varying: microbatches differ in shape; each message then begins with its shapes.
        lookahead: number of actions between a receive and its use. Each takes a buffer of the size of a
            boundary; a message that arrives after its receive is posted costs the CPU about half.
        before_forward: called before each forward with the microbatch's index in its step; with `window`,
            with its slot of `ring`.
        autocast: dtype of forward computation, if it differs from the parameters'.
        graphs: each microbatch of training is replayed as one device graph (`MicrobatchGraph`). Its gradients
            are reduced at the end of the step.

    Attributes:
        rank: rank of this process in its pipeline.
        stages: stages of this rank by number.
        buffers: gradients of the stages (`StageWeights.buffers`).
        drains_each_step: a window has one step.
        ring: microbatches after which memory is reused: those of a step, or with `window` of several. The
            first microbatch of step n of a window is in slot `n * m % ring`.
        ahead: minimum number of steps that a window in progress has after its finished ones.
        late: number of steps after which all ranks have also finished a step, so that agreeing on it delays
            no rank.
        holds_loss: this rank has a last stage.

    Raises:
        StrettoError: the program is for another number of ranks or deadlocks; it has more stages than layers;
            it is asynchronous, and the weights have no optimiser or parameters are tied; or microbatches
            cannot be captured as graphs.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        program: Program,
        mesh: Mesh,
        loss: Loss | None = None,
        *,
        window: Callable[[int], Program] | None = None,
        weights: StageWeights | None = None,
        cut: Sequence[range] | None = None,
        skips: Sequence[Skip] = (),
        ties: Sequence[Tie] | None = None,
        partial: Sequence[PartialGradient] = (),
        boundary: Boundary | Mapping[int, Boundaries] | None = None,
        varying: bool = False,
        lookahead: int = LOOKAHEAD,
        before_forward: Callable[[int], None] | None = None,
        autocast: torch.dtype | None = None,
        graphs: bool = False,
    ) -> None:
        if program.ranks != mesh.size("pp"):
            raise StrettoError(
                f"the program is for {program.ranks} pipeline ranks, the layout has pp={mesh.size('pp')}",
                hint="make the schedule with ranks=pp",
            )
        if graphs:
            check_capturable(program, mesh.device, autocast)
        self.mesh = mesh
        self.rank = mesh.index("pp")
        self.weights = weights if weights is not None else ReplicatedWeights()
        self.cut = list(cut) if cut is not None else even_cut(parameter_counts(layers), program.depth)
        check_cut(self.cut, len(layers), program.depth)
        self._skips = check_skips(skips, len(layers))
        ties = list(ties) if ties is not None else find_ties(layers)
        sets = sorted({t.stages(self.cut) for t in ties if len(t.stages(self.cut)) > 1})
        check_asynchronous(program, self.weights.updates_stages, sets)
        self._lookahead = lookahead
        self.program = lower(program, tied=sets, lookahead=lookahead)
        check(self.program)
        self._rounds = once(self.program)
        if window is not None:
            self._rounds = repeated(window, self.rank, tied=sets, lookahead=lookahead)
        self.drains_each_step = window is None
        self.ring, self.ahead = self._rounds.ring, self._rounds.ahead
        self.late = max(1, -(-(program.ranks - 1) // program.microbatches))
        self.stages = dict[int, Stage]()
        for s in program.stages_of(self.rank):
            held_layers = self.layers_of(s)
            self.stages[s] = Stage([layers[i] for i in held_layers], held_layers.start, self._skips)
        for s in {a.stage for a in program.orders[self.rank] if a.kind is ActionKind.W}:
            convert_linears(self.stages[s])
        self.holds_loss = any(program.is_last(s) for s in self.stages)
        self._loss = loss
        self._before = before_forward
        self._autocast = autocast
        self._graphs = graphs
        self._partial = list(partial)
        self._varying = varying
        self._shared = SharedGradients(program, self.cut, ties, self.stages, mesh)
        self.weights.attach(
            mesh,
            {s: list(stage) for s, stage in self.stages.items()},
            list(self._shared.late.values()),
            self._shared.tied(),
        )
        self.buffers = self.weights.buffers
        self._transfer = (
            Transfer(mesh.layout.groups("pp"), self.program, mesh.timeout) if mesh.size("pp") > 1 else None
        )
        self._boundaries: dict[int, Boundaries] | None = None  # unknown before the trial forward
        if isinstance(boundary, Boundary):
            self._boundaries = dict.fromkeys(range(1, program.depth), (boundary,))
        elif boundary is not None:
            self._boundaries = dict(boundary)
        self._versions = dict[int, WeightVersions]()
        if self.program.versions:
            for s, stage in self.stages.items():
                renew = functools.partial(self.weights.recreate_storage, s)
                self._versions[s] = WeightVersions(stage, self._update(s), renew)
        self._train: Executor | None = None
        self._infer = dict[int, Executor]()

    # ------------------------------------------------------------------ stages of this rank

    def __repr__(self) -> str:
        place = f"rank {self.rank} of {self.program.ranks}"
        return f"Pipeline({self.program.name!r}: {place}, stages {', '.join(map(str, self.stages))})"

    def parameters(self) -> list[nn.Parameter]:
        """Return this rank's parameters, without duplicates."""
        return list({id(p): p for stage in self.stages.values() for p in stage.parameters()}.values())

    def copies_elsewhere(self) -> list[nn.Parameter]:
        """Return this rank's tied or copied parameters whose first copy is on another rank, where norms count
        them and checkpoints save them.
        """
        return self._shared.copies_elsewhere(self.rank)

    def post_reduced_parameters(self) -> list[nn.Parameter]:
        """Return the parameters whose gradients are also summed after the data-parallel reduction: over
        tensor-parallel ranks, stages, or copies of a stage.
        """
        if self.program.copies > 1:
            return self.parameters()
        tied = [p for p in self.parameters() if id(p) in self._shared.tied()]
        return [*tied, *(part.parameter for part in self._partial)]

    def layers_of(self, stage: int) -> range:
        """Return the indices of the layers of a stage, of any copy of the model."""
        return self.cut[stage % self.program.depth]

    @property
    def weight_versions(self) -> dict[int, int]:
        """Peak number of versions of each stage's weights in the last step."""
        return {s: self._versions[s].max_held if s in self._versions else 1 for s in self.stages}

    def train(self, mode: bool = True) -> None:
        """Set training or evaluation mode of this rank's stages."""
        for stage in self.stages.values():
            stage.train(mode)

    # ------------------------------------------------------------------ running

    def step(
        self,
        inputs: Sequence[Any],
        targets: Sequence[Any] = (),
        scale: Scale = None,
        recorder: Recorder | None = None,
    ) -> Tensor | None:
        """Run forward and backward of one batch; reduced gradients are then in `parameter.grad`.

        An asynchronous program updates the weights within the step and leaves no gradients. The pipeline
        drains at the end of a step: no microbatch stays in flight. For steps without a drain see `advance`.

        Args:
            inputs: input of each microbatch, a tensor or a tuple of arguments; used by ranks that hold the
                first stage.
            targets: target of each microbatch; used by ranks that hold the last stage.
            scale: gradient of each microbatch's loss, such as 1 / tokens of the global batch; a sequence has
                one for each.
            recorder: times every call, and the wait for reductions at the end.

        Returns:
            The losses of the microbatches [m] on the rank that holds the last stage, None on others. With
            copies of the model, each rank that holds a last stage has the losses of the microbatches that go
            through it.

        Raises:
            StrettoError: the pipeline has no loss, or not every microbatch has one input and one target.
            PipelineError: this rank failed; the message names the action.
        """
        self._check_batch(inputs, targets, self.program.microbatches)
        return self.advance(lambda _: (inputs, targets, scale), 1, recorder)

    @property
    def drained(self) -> bool:
        """True if no microbatch is in flight: the next step begins a window."""
        return self._train is None or self._train.step == 0

    def advance(
        self,
        enter: Callable[[int], tuple[Sequence[Any], Sequence[Any], Scale]],
        steps: int,
        recorder: Recorder | None = None,
    ) -> Tensor | None:
        """Run one step of a window of steps, which drains only at its end: an asynchronous program runs to
        this rank's last action of the step, with actions of later steps in between.

        Args:
            enter: returns inputs, targets and scale of a step of the window, as `step` takes them. Called
                once for each step, in order, when this rank first needs its batch.
            steps: number of steps of the window, the same on all ranks. It may shrink while the window runs,
                but not below the finished steps and `ahead` more.
            recorder: as in `step`.

        Returns:
            Those of `step`, for the step that has finished on this rank.
        """
        if self._loss is None:
            raise StrettoError(
                "a training step needs a loss", hint="give the pipeline one: Pipeline(..., loss=...)"
            )

        def of_step(number: int) -> Batch:
            inputs, targets, scale = enter(number)
            self._check_batch(inputs, targets, self.program.microbatches)
            return inputs, targets, self._gradients_of_losses(scale)

        batch = of_step if self._train is not None else self._prepare(of_step)
        executor = self._train
        assert executor is not None
        if executor.step == 0:
            for buffer in self.buffers.values():
                buffer.zero()
            for versions in self._versions.values():
                versions.start()
        try:
            with self._precision():
                executor.advance(batch, steps, recorder)
        finally:
            if executor.step == 0:
                for versions in self._versions.values():
                    versions.end()
        if executor.step == 0:
            if recorder is None:
                self._finish_reductions()
            else:
                recorder.record(REDUCTIONS, self._finish_reductions, None)
        return self._results(executor)

    def _prepare(self, enter: Enter) -> Enter:
        """Create the executor of training; return `enter`, which repeats the first batch if it was
        fetched.
        """
        if self._boundaries is not None or self._varying:
            self._train = self._executor(self._rounds, ())
            return enter
        first = enter(0)
        self._train = self._executor(self._rounds, first[0])
        return lambda number: enter(number) if number else first

    def _finish_reductions(self) -> None:
        for buffer in self.buffers.values():
            buffer.flush()
            buffer.wait()
        if not self.program.versions:
            sum_partial(self._partial, self._reduced)

    @torch.no_grad()
    def evaluate(self, inputs: Sequence[Any], targets: Sequence[Any] = ()) -> Any:
        """Run only forwards; return the losses of any number of microbatches, like `step`. Collective.

        Every rank passes the same number of inputs; ranks without the first stage may pass None for each.
        Without a loss the rank that holds the last stage gets the outputs: stacked, or as a list if they
        differ in shape or are tuples.
        """
        m = len(inputs)
        self._check_batch(inputs, targets, m)
        if m not in self._infer:
            program = lower(forward_only(self.program, m), lookahead=self._lookahead)
            self._infer[m] = self._executor(once(program), inputs)
        was = [(module, module.training) for stage in self.stages.values() for module in stage.modules()]
        self.train(False)
        try:
            with self._precision():
                self._infer[m].run(inputs, targets)
        finally:
            for module, mode in was:  # for each module: some may have been in evaluation mode
                module.training = mode
        return self._results(self._infer[m])

    def close(self) -> None:
        """Release communicators and buffers."""
        self._train = None  # it refers to this object: break the cycle
        self._infer.clear()
        if self._transfer is not None:
            self._transfer.close()

    def _precision(self) -> torch.autocast:
        return torch.autocast(
            self.mesh.device.type, self._autocast or torch.bfloat16, enabled=self._autocast is not None
        )

    def _results(self, executor: Executor) -> Any:
        program, live = executor.program, executor.live
        ends = (
            [program.depth - 1]
            if not program.trains
            else range(program.depth - 1, program.stages, program.depth)
        )
        if not any(end in self.stages for end in ends):
            return None
        of_step = (program if executor.rounds.cycle == 0 else self.program).copy_of
        local_microbatches = [
            i for i, copy in enumerate(of_step) if (copy + 1) * program.depth - 1 in self.stages
        ]
        if not local_microbatches:  # a copy without microbatches
            return torch.empty(0, device=self.mesh.device)
        results = [
            (live.losses if self._loss is not None else live.outputs)[executor.place + i]
            for i in local_microbatches
        ]
        if all(isinstance(t, Tensor) and t.shape == results[0].shape for t in results):
            return torch.stack(results)
        return results

    def _check_batch(self, inputs: Sequence[Any], targets: Sequence[Any], microbatches: int) -> None:
        first = any(self.program.is_first(s) for s in self.stages)
        for kind, values, needed in (
            ("inputs", inputs, first),
            ("targets", targets, self.holds_loss and self._loss is not None),
        ):
            if needed and (len(values) != microbatches or not microbatches):
                raise StrettoError(
                    f"{len(values)} {kind} for {microbatches} microbatches",
                    hint=f"give one of the {kind} for each microbatch, at least one",
                )

    def _gradients_of_losses(self, scale: Scale) -> Sequence[Tensor | None]:
        m = self.program.microbatches
        if not self.holds_loss:
            return ()
        dtype = next((p.dtype for p in self.parameters()), torch.float32)
        dtype = dtype if dtype == torch.float64 else torch.float32
        scales = moved(torch.as_tensor(1.0 if scale is None else scale, dtype=dtype), self.mesh.device)
        if not scales.dim():
            return [scales] * m
        if len(scales) != m:
            raise StrettoError(
                f"{len(scales)} scales for {m} microbatches", hint="give one for each, or one for all"
            )
        return list(scales)

    # ------------------------------------------------------------------ building

    def _executor(self, rounds: SteadyState, inputs: Sequence[Any]) -> Executor:
        if self._boundaries is None and not self._varying:
            self._boundaries = probe_boundaries(
                program=self.program,
                rank=self.rank,
                stages=self.stages,
                transfer=self._transfer,
                inputs=inputs,
                before=self._before,
                group=self.mesh.group("pp"),
                device=self.mesh.device,
            )
        work = ExecutorInputs(
            stages=self.stages,
            weights=self.weights,
            loss=self._loss,
            transfer=self._transfer,
            boundaries=self._boundaries,
            before_forward=self._before,
        )
        if rounds is self._rounds:
            work = replace(
                work,
                reduce_tied=lambda: self._shared.sum(self.buffers),
                versions=self._versions,
                graphs=self._graphs,
            )
        return Executor(rounds, self.rank, work, self.mesh.device)

    def _reduced(self, parameter: nn.Parameter) -> tuple[Tensor, int] | None:
        """Return this rank's flat part of a parameter's reduced gradient, and the index of its first
        element.
        """
        parts = (buffer.reduced(parameter) for buffer in self.buffers.values())
        return next((part for part in parts if part is not None), None)

    def _update(self, stage: int) -> Callable[[], None]:
        """Return the update of one stage within the program."""
        buffer, ids = self.buffers[stage], {id(p) for p in self.stages[stage].parameters()}
        shared = [part for part in self._partial if id(part.parameter) in ids]

        def call() -> None:
            buffer.wait()
            sum_partial(shared, self._reduced)
            self.weights.update(stage)
            buffer.zero()

        return call
