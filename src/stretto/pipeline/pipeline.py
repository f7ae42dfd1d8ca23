"""A model cut into stages over pipeline ranks, and its training step: any list of modules, any schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from stretto.errors import StrettoError
from stretto.layout.cut import cut as even_cut
from stretto.parallel.collectives import all_sum
from stretto.parallel.gradients import BUCKET_BYTES, GradientBuffer
from stretto.parallel.mesh import Mesh
from stretto.pipeline.executor import Executor
from stretto.pipeline.live import Boundary
from stretto.pipeline.probe import probe_boundaries
from stretto.pipeline.ties import Tie, find_ties
from stretto.pipeline.transfer import Transfer
from stretto.schedule.action import Action, Kind
from stretto.schedule.check import check
from stretto.schedule.lower import lower
from stretto.schedule.program import Program

Loss = Callable[[Tensor, Any], Tensor]


@dataclass(frozen=True)
class PartialGradient:
    """A slice of a parameter whose gradient other ranks share in: summed over `group` once a step."""

    parameter: nn.Parameter
    dim: int
    start: int
    size: int
    group: ProcessGroup

    def sum(self) -> None:
        """Add up what the ranks of the group have."""
        assert self.parameter.grad is not None
        view = self.parameter.grad.narrow(self.dim, self.start, self.size)
        if view.is_contiguous():
            all_sum(view, self.group)
        else:
            view.copy_(all_sum(view.contiguous(), self.group))


class Pipeline:
    """One rank's part of a model, trained by a program.

    Args:
        layers: the model in order; each takes one tensor and returns one. Layers of other ranks are not used
            and may stay on the meta device.
        program: from `stretto.schedule`; its ranks are the mesh's pp.
        mesh: process groups. Every pipeline of the mesh runs the same program on its own data.
        loss: (output of the last layer, target) to a scalar, summed over the microbatch.
        cut: layers of each stage; by default cut evenly by parameter count.
        ties: shared parameters; found by identity unless given (they are lost when layers leave the meta
            device).
        partial: slices whose gradients several tensor-parallel ranks share.
        boundary: shape and type of the activations between stages; found by a trial forward unless given.
        bucket_bytes: size of one gradient reduction.
        before_forward: called with the microbatch's number before each forward.
        autocast: type that forwards compute in, where it is not the parameters' own.

    Raises:
        StrettoError: a program for another number of ranks or one that cannot complete; more stages than
            layers.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        program: Program,
        mesh: Mesh,
        loss: Loss | None = None,
        *,
        cut: Sequence[range] | None = None,
        ties: Sequence[Tie] | None = None,
        partial: Sequence[PartialGradient] = (),
        boundary: Boundary | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        before_forward: Callable[[int], None] | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        if program.ranks != mesh.size("pp"):
            raise StrettoError(
                f"the program is for {program.ranks} pipeline ranks, the layout has pp={mesh.size('pp')}",
                hint="make the schedule with ranks=pp",
            )
        self.mesh = mesh
        self.rank = mesh.index("pp")
        self.cut = list(cut) if cut is not None else even_cut(_weights(layers), program.stages)
        _check_cut(self.cut, len(layers), program.stages)
        self._ties = list(ties) if ties is not None else find_ties(layers)
        sets = sorted({t.stages(self.cut) for t in self._ties if len(t.stages(self.cut)) > 1})
        self.program = lower(program, tied=sets)
        check(self.program)
        self.stages = {
            s: nn.Sequential(*(layers[i] for i in self.cut[s])) for s in program.stages_of(self.rank)
        }
        self.holds_loss = program.stages - 1 in self.stages
        self._loss, self._before, self._autocast = loss, before_forward, autocast
        self._partial = list(partial)
        self._late = dict[int, nn.Parameter]()  # shared by several stages of this rank
        self._tied_sums = self._tie_groups()
        self.buffers = self._make_buffers(bucket_bytes)
        self._transfer = (
            Transfer(mesh.layout.groups("pp"), self.program, mesh.timeout) if mesh.size("pp") > 1 else None
        )
        self._boundaries = None if boundary is None else dict.fromkeys(range(1, program.stages), boundary)
        self._train: Executor | None = None
        self._infer = dict[int, Executor]()

    # ------------------------------------------------------------------ what this rank holds

    def parameters(self) -> list[nn.Parameter]:
        """This rank's parameters, each once."""
        return list({id(p): p for stage in self.stages.values() for p in stage.parameters()}.values())

    def copies_elsewhere(self) -> list[nn.Parameter]:
        """Tied parameters held here whose first copy is on another rank: not to be counted or saved twice."""
        found = list[nn.Parameter]()
        for tie in self._ties:
            first = tie.stages(self.cut)[0]
            if self.program.placement[first] != self.rank:
                found.extend(self._parameter(tie, s) for s in tie.stages(self.cut) if s in self.stages)
        return found

    def train(self, mode: bool = True) -> None:
        """Training or evaluation mode of the stages held here."""
        for stage in self.stages.values():
            stage.train(mode)

    # ------------------------------------------------------------------ running

    def step(
        self, inputs: Sequence[Any], targets: Sequence[Any] = (), scale: Tensor | float | None = None
    ) -> Tensor | None:
        """Forward and backward of one batch; leaves reduced gradients in `parameter.grad`.

        Args:
            inputs: one tensor per microbatch; used by the rank that holds the first stage.
            targets: one per microbatch; used by the rank that holds the last stage.
            scale: gradient of each microbatch's loss, such as 1 / tokens of the global batch.

        Returns:
            The losses of the microbatches [m] on the rank that holds the last stage, None elsewhere.

        Raises:
            StrettoError: no loss, or not one input and one target for each microbatch of the program.
            PipelineError: names the action during which this rank failed.
        """
        if self._loss is None:
            raise StrettoError(
                "a training step needs a loss", hint="give the pipeline one: Pipeline(..., loss=...)"
            )
        self._check_batch(inputs, targets, self.program.microbatches)
        if self._train is None:
            self._train = self._executor(self.program, inputs)
        for buffer in self.buffers.values():
            buffer.zero()
        with self._precision():
            self._train.run(inputs, targets, self._gradient_of_loss(scale))
        for buffer in self.buffers.values():
            buffer.flush()
            buffer.wait()
        for part in self._partial:
            part.sum()
        return self._losses(self._train)

    @torch.no_grad()
    def evaluate(self, inputs: Sequence[Any], targets: Sequence[Any] = ()) -> Tensor | None:
        """Forward only: the losses of any number of microbatches, as `step` returns them.

        Every rank passes as many inputs; ranks that do not hold the first stage may pass None for each.
        Without a loss the rank that holds the last stage gets the outputs, stacked.
        """
        m = len(inputs)
        self._check_batch(inputs, targets, m)
        if m not in self._infer:
            self._infer[m] = self._executor(lower(forward_only(self.program, m)), inputs)
        was = [(module, module.training) for stage in self.stages.values() for module in stage.modules()]
        self.train(False)
        try:
            with self._precision():
                self._infer[m].run(inputs, targets)
        finally:
            for module, mode in was:  # each its own: parts of a model may be held in evaluation mode
                module.training = mode
        return self._losses(self._infer[m])

    def close(self) -> None:
        """Give back communicators."""
        if self._transfer is not None:
            self._transfer.close()

    def _precision(self) -> torch.autocast:
        return torch.autocast(
            self.mesh.device.type, self._autocast or torch.bfloat16, enabled=self._autocast is not None
        )

    def _losses(self, executor: Executor) -> Tensor | None:
        if not self.holds_loss:
            return None
        return torch.stack(executor.live.losses if self._loss is not None else executor.live.outputs)

    def _check_batch(self, inputs: Sequence[Any], targets: Sequence[Any], microbatches: int) -> None:
        for what, given, needed in (
            ("inputs", inputs, 0 in self.stages),
            ("targets", targets, self.holds_loss and self._loss is not None),
        ):
            if needed and (len(given) != microbatches or not microbatches):
                raise StrettoError(
                    f"{len(given)} {what} for {microbatches} microbatches",
                    hint=f"give one of the {what} for each microbatch, at least one",
                )

    def _gradient_of_loss(self, scale: Tensor | float | None) -> Tensor | None:
        if not self.holds_loss:
            return None
        if isinstance(scale, Tensor):
            return scale
        dtype = next((p.dtype for p in self.parameters()), torch.float32)
        dtype = dtype if dtype == torch.float64 else torch.float32
        return torch.tensor(1.0 if scale is None else scale, dtype=dtype, device=self.mesh.device)

    # ------------------------------------------------------------------ building

    def _executor(self, program: Program, inputs: Sequence[Any]) -> Executor:
        if self._boundaries is None:
            self._boundaries = probe_boundaries(
                self.program, self.rank, self.stages, self._transfer, inputs, self._before, self.mesh.device
            )
        trains = program is self.program
        return Executor(
            program,
            self.rank,
            self.stages,
            self._transfer,
            self._boundaries,
            self._loss,
            self.buffers if trains else {},
            self._reduce_tied if trains else None,
            self._before if trains else None,
            self.mesh.device,
        )

    def _make_buffers(self, bucket_bytes: int) -> dict[int, GradientBuffer]:
        """One buffer a stage, and one (numbered -1) for parameters that several stages here share."""
        buffers, group = dict[int, GradientBuffer](), self.mesh.group("dp")
        for s, stage in self.stages.items():
            own = [p for p in stage.parameters() if p.requires_grad and id(p) not in self._late]
            buffers[s] = GradientBuffer(own, [stage], group, bucket_bytes)
        if self._late:
            buffers[-1] = GradientBuffer(list(self._late.values()), [], group, bucket_bytes)
        return buffers

    def _tie_groups(self) -> list[tuple[nn.Parameter, ProcessGroup]]:
        """(parameter, group) of every tied sum that this rank takes part in, in one order on all ranks."""
        sums = list[tuple[nn.Parameter, ProcessGroup]]()
        made = dict[tuple[int, ...], ProcessGroup | None]()
        for tie in self._ties:
            stages = tie.stages(self.cut)
            here = [s for s in stages if s in self.stages]
            holders = tuple(sorted({self.program.placement[s] for s in stages}))
            if len(holders) > 1 and holders not in made:
                made[holders] = self.mesh.pair_group(holders)
            if len(here) > 1:
                parameter = self._parameter(tie, here[0])
                self._late[id(parameter)] = parameter
            group = made.get(holders)
            if here and group is not None:
                sums.append((self._parameter(tie, here[0]), group))
        return sums

    def _parameter(self, tie: Tie, stage: int) -> nn.Parameter:
        layer, name = next((layer, name) for layer, name in tie.uses if layer in self.cut[stage])
        return self.stages[stage][layer - self.cut[stage].start].get_parameter(name)

    def _reduce_tied(self) -> None:
        for buffer in self.buffers.values():
            buffer.flush()
            buffer.wait()
        for parameter, group in self._tied_sums:
            assert parameter.grad is not None
            all_sum(parameter.grad, group)


def forward_only(program: Program, microbatches: int) -> Program:
    """The forwards of a program's stages for any number of microbatches, in an order that always
    completes.
    """
    orders = tuple(
        tuple(Action(s, Kind.F, i) for i in range(microbatches) for s in program.stages_of(rank))
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
    )


def _check_cut(cut: Sequence[range], layers: int, stages: int) -> None:
    """Every layer in one stage, in order."""
    if len(cut) != stages or [layer for stage in cut for layer in stage] != list(range(layers)):
        raise StrettoError(
            f"cut {[(stage.start, stage.stop) for stage in cut]} of {layers} layers into {stages} stages",
            hint=f"give {stages} ranges that follow one another and hold layers 0 to {layers - 1}",
        )


def _weights(layers: Sequence[nn.Module]) -> list[float]:
    return [1.0 + sum(p.numel() for p in layer.parameters()) for layer in layers]


__all__ = ["Boundary", "PartialGradient", "Pipeline", "forward_only"]
