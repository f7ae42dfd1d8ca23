"""The compute actions of one rank, each bound to a call without arguments.

All lookups are done once, when a call is created, so the step loop only runs calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from stretto.engine.device import CopyStreams
from stretto.engine.parallel.recompute import RandomState
from stretto.engine.parallel.tensor.linear import DeferredGradient, run_deferred
from stretto.engine.pipeline.activation_offload import ActivationCopies
from stretto.engine.pipeline.exchange import TransferCalls
from stretto.engine.pipeline.rank_buffers import Bundle, Call, RankBuffers, same_memory
from stretto.engine.pipeline.versions import WeightVersions, ages
from stretto.program.action import Action, ActionKind
from stretto.program.messages import needed_by
from stretto.program.program import Program

# autograd's engine itself: torch.autograd.backward adds 10 us of checks to every call
_run_backward: Callable[..., Any] = torch.autograd.Variable._execution_engine.run_backward  # pyright: ignore


@runtime_checkable
class LayerLoss(Protocol):
    """A loss that the last layer computes and outputs; its targets are set before that layer's forward. In
    training its value is only valid after the backward.
    """

    def expect(self, targets: Any) -> None: ...

    def __call__(self, y: Any, targets: Any) -> Tensor: ...


class ComputeCalls:
    """Creates the calls of one rank's compute actions.

    Args:
        exchange: delivers messages of other ranks, or None without other ranks.
        loss: maps (output of the last stage, targets) to a scalar, or is a `LayerLoss`; None stores the
            outputs instead.
        before: called with the microbatch's slot in `live` before each forward and each backward, since
            layers may recompute in the backward.
        versions: weight versions by stage, if weights change within the step.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        live: RankBuffers,
        exchange: TransferCalls | None,
        loss: Callable[[Any, Any], Tensor] | None,
        before: Callable[[int], None] | None,
        versions: dict[int, WeightVersions] | None = None,
    ) -> None:
        self.program = program
        self.live = live
        self.exchange = exchange
        self.loss = loss
        self.before = before
        self.versions = versions or {}
        order = program.orders[rank]
        self.trains = any(a.kind in (ActionKind.B, ActionKind.I) for a in order)
        self.split = {a.stage for a in order if a.kind is ActionKind.W}
        self.recomputed = {(a.stage, a.microbatch) for a in order if a.kind is ActionKind.RECOMPUTE}
        streams = CopyStreams()
        self.offloaded = {
            (a.stage, live.place(a)): ActivationCopies(streams) for a in order if a.kind is ActionKind.OFFLOAD
        }
        self.random = dict[tuple[int, int], RandomState]()
        queue: list[
            DeferredGradient
        ] = []  # one queue for all stages: they may share a layer, and each I empties the queue
        for stage in self.split:
            live.stages[stage].split_backward(queue)
        self.ages = {s: ages([a for a in order if a.stage == s], program.versions[s]) for s in self.versions}

    # ------------------------------------------------------------------ forward

    def forward(self, action: Action) -> Call:
        """Bind a forward: x = input; y = stage(x); store the graph's root for the backward and pass y on."""
        stage, mb = action.stage, self.live.place(action)
        buffers, fetch = self.live.stages[stage], self._input(action)
        run, xs = self._run(action), buffers.x
        keep, pass_on = self._keep(stage, mb), self._pass_on(stage, mb)

        if not self.trains:

            def infer() -> None:
                x = fetch()
                pass_on(run(x), x)

            return infer
        if (stage, action.microbatch) in self.recomputed:
            state = self.random.setdefault((stage, mb), RandomState())

            def forward_without_graph() -> None:
                xs[mb] = x = fetch()
                state.save(x)
                with torch.no_grad():
                    pass_on(run(x), ())

            return forward_without_graph

        def train() -> None:
            xs[mb] = x = fetch()
            y = run(x)
            keep(y)
            pass_on(y, ())

        return train

    def recompute(self, action: Action) -> Call:
        """Bind a repeated forward, this time with its graph."""
        stage, mb = action.stage, self.live.place(action)
        xs = self.live.stages[stage].x
        run = self._run(action)
        keep = self._keep(stage, mb)
        state = self.random[stage, mb]

        def call() -> None:
            with state.restored():
                keep(run(xs[mb]))

        return call

    def _run(self, action: Action) -> Callable[[Bundle], Any]:
        """Return the stage's forward, after `before` and with the weights of its version."""
        stage = action.stage
        module = self.live.stages[stage].module.forward
        host = self.offloaded.get((stage, self.live.place(action)))
        prepare, live = self._prepare(action), self.live
        mb = live.place(action)
        inside = isinstance(self.loss, LayerLoss) and self.program.is_last(stage)
        expect = self.loss.expect if inside else None  # pyright: ignore
        if prepare is None and host is None and expect is None:
            return lambda x: module(*x)

        def run(x: Bundle) -> Any:
            if prepare is not None:
                prepare()
            if expect is not None:
                expect(live.targets[mb])
            if host is None:
                return module(*x)
            with host.watching(x):
                return module(*x)

        return run

    def _prepare(self, action: Action) -> Call | None:
        """Return the preparation of a forward or backward: call `before`, and bind the microbatch's version
        of the weights. None if neither applies.
        """
        stage, mb = action.stage, self.live.place(action)
        before, versions = self.before, self.versions.get(stage)
        if versions is None:
            return None if before is None else partial(before, mb)
        age = self.ages[stage].of[action]

        def prepare() -> None:
            if before is not None:
                before(mb)
            versions.use(age)

        return prepare

    def _input(self, action: Action) -> Callable[[], Bundle]:
        stage = action.stage
        live = self.live
        mb = live.place(action)
        if self.program.is_first(stage):

            def first_input() -> Bundle:
                x = live.inputs[mb]
                return x if type(x) is tuple else (x,)

            return first_input
        receive = needed_by(self.program, action)
        if receive is not None:
            assert self.exchange is not None
            return self.exchange.incoming(receive)
        outputs, trains = live.stages[stage - 1].y, self.trains

        def local() -> Bundle:
            y, outputs[mb] = outputs[mb], None
            if trains:
                for t in y:
                    if t.is_floating_point():
                        t.requires_grad_()
            return y

        return local

    def _keep(self, stage: int, mb: int) -> Callable[[Any], None]:
        """Return a function that stores the start of the backward: the graph's edge, so that the output's
        memory can be freed.
        """
        roots = self.live.stages[stage].root
        if self.program.is_last(stage):
            loss = self.loss
            losses = self.live.losses
            live = self.live

            def close(y: Any) -> None:
                assert loss is not None
                value = loss(y, live.targets[mb])
                roots[mb] = (value,)
                losses[mb] = value.detach()

            return close

        def middle(y: Any) -> None:
            if type(y) is tuple:
                roots[mb] = tuple(_edge(t) for t in y if t.is_floating_point())
            else:
                roots[mb] = (_edge(y),)

        return middle

    def _pass_on(self, stage: int, mb: int) -> Callable[[Any, Bundle], None]:
        """Return a function that stores the output for the send, or for the next stage on this rank.

        The next message may overwrite the memory of `reused` immediately, so an output in it is copied.
        """
        live = self.live
        loss = self.loss
        ys = self.live.stages[stage].y
        losses = live.losses
        outputs = live.outputs
        trains = self.trains

        def middle(y: Any, reused: Bundle) -> None:
            if type(y) is tuple:
                ys[mb] = tuple(_unaliased(t.detach(), reused) for t in y)
            else:
                ys[mb] = (_unaliased(y.detach(), reused),)

        def last(y: Any, reused: Bundle) -> None:
            if loss is None:
                outputs[mb] = (
                    tuple(_unaliased(t, reused) for t in y) if type(y) is tuple else _unaliased(y, reused)
                )
            elif not trains:
                losses[mb] = loss(y, live.targets[mb])

        return last if self.program.is_last(stage) else middle

    # ------------------------------------------------------------------ backward

    def backward(self, action: Action) -> Call:
        """Bind a backward, which runs the graph of one microbatch back to the stage's input."""
        stage, mb = action.stage, self.live.place(action)
        buffers, fetch = self.live.stages[stage], self._gradient(action)
        roots, xs = buffers.root, buffers.x
        hand_back = self._hand_back(action)
        drop, prepare = self._drop(action), self._prepare(action)

        def call() -> None:
            edges, roots[mb] = roots[mb], None
            dy = fetch()
            if prepare is not None:
                prepare()
            _backward(edges, dy)
            x, xs[mb] = xs[mb], None
            hand_back(x, dy)
            if drop is not None:
                drop()

        if action.kind is ActionKind.I and buffers.walk is not None:
            return self._walk(action)
        if stage not in self.split or buffers.walk is not None:
            return call
        queue, weight_work = buffers.queue, buffers.weight_work
        weights = self.weights(action) if action.kind is ActionKind.B else None

        def split() -> None:
            call()
            weight_work[mb] = list(queue)
            queue.clear()
            if weights is not None:
                weights()

        return split

    def _walk(self, action: Action) -> Call:
        """Bind the input gradient of a stage whose graph is walked (`walk`), since its layers cannot
        defer.
        """
        stage, mb = action.stage, self.live.place(action)
        buffers = self.live.stages[stage]
        fetch = self._gradient(action)
        hand_back = self._hand_back(action)
        roots = buffers.root
        xs = buffers.x
        weight_work = buffers.weight_work
        walk = buffers.walk
        first = self.program.is_first(stage)
        prepare = self._prepare(action)
        assert walk is not None

        def call() -> None:
            edges, roots[mb] = roots[mb], None
            dy = fetch()
            if prepare is not None:
                prepare()
            x, xs[mb] = xs[mb], None
            live = [(e, d) for e, d in zip(edges, dy, strict=True) if e is not None]
            leaves = () if first else [t for t in x if t.requires_grad]
            weight_work[mb] = walk.input_gradients([e for e, _ in live], [d for _, d in live], leaves)
            hand_back(x, dy)

        return call

    def _drop(self, action: Action) -> Call | None:
        """Return the call after a backward that frees its version of the weights after the last use, or
        None.
        """
        stage = action.stage
        if stage not in self.versions:
            return None
        version_ages = self.ages[stage]
        return partial(self.versions[stage].drop, version_ages.of[action], version_ages.following[action])

    def update(self, action: Action) -> Call:
        """Bind the update of one stage."""
        return partial(self.versions[action.stage].update, self.ages[action.stage].following[action])

    def _hand_back(self, action: Action) -> Callable[[Bundle, Bundle], None]:
        """Return a function that stores the input's gradients for the send, or for the previous stage on this
        rank.
        """
        stage, mb = action.stage, self.live.place(action)
        dxs, received = self.live.stages[stage].dx, needed_by(self.program, action) is not None
        if self.program.is_first(stage):
            return lambda _x, _dy: None

        def call(x: Bundle, dy: Bundle) -> None:
            # a stage that only reshapes passes on dy, in the buffer that receives the next message
            dxs[mb] = tuple(_gradient(t, dy if received else ()) for t in x if t.requires_grad)

        return call

    def _gradient(self, action: Action) -> Callable[[], tuple[Any, ...]]:
        stage = action.stage
        live = self.live
        mb = live.place(action)
        if self.program.is_last(stage):
            return lambda: (live.scales[mb],)
        receive = needed_by(self.program, action)
        if receive is not None:
            assert self.exchange is not None
            return self.exchange.incoming(receive)
        gradients = live.stages[stage + 1].dx

        def local() -> Bundle:
            dy, gradients[mb] = gradients[mb], None
            return dy

        return local

    def weights(self, action: Action) -> Call:
        """Bind the weight gradients that the input-gradient pass has deferred."""
        buffers, mb = self.live.stages[action.stage], self.live.place(action)
        weight_work, walk = buffers.weight_work, buffers.walk
        if walk is not None:

            def walked() -> None:
                left, weight_work[mb] = weight_work[mb], None
                walk.weight_gradients(left)

            return walked

        def call() -> None:
            entries, weight_work[mb] = weight_work[mb], None
            with torch.no_grad():  # as inside autograd's engine, where B runs them
                run_deferred(entries)

        return call

    def offload(self, action: Action) -> Call:
        """Return the call that starts copying the forward's saved tensors to host memory."""
        return self.offloaded[action.stage, self.live.place(action)].offload

    def reload(self, action: Action) -> Call:
        """Return the call that starts copying them back."""
        return self.offloaded[action.stage, self.live.place(action)].reload


def _edge(y: Tensor) -> Any:
    """Return the edge at which the backward enters the graph of y, or None if y requires no gradient."""
    return get_gradient_edge(y) if y.requires_grad else None


def _backward(edges: tuple[Any, ...], dy: tuple[Any, ...]) -> None:
    if len(edges) == 1:
        if edges[0] is not None:
            _run_backward(edges, dy, False, False, (), True, True)
        return
    live = [(e, d) for e, d in zip(edges, dy, strict=True) if e is not None]
    if live:
        roots, gradients = zip(*live, strict=True)
        _run_backward(roots, gradients, False, False, (), True, True)


def _gradient(x: Tensor, received: Bundle) -> Tensor:
    """Return the gradient accumulated in x, copied if it is a view of a received message."""
    dx, x.grad = x.grad, None
    if dx is None:  # the stage does not use this input
        return torch.zeros_like(x, requires_grad=False)
    return dx.clone() if any(same_memory(dx, dy) for dy in received) else dx


def _unaliased(y: Tensor, reused: Bundle) -> Tensor:
    """Return y, copied if it is a view of memory that receives messages."""
    return y.clone() if any(same_memory(x, y) for x in reused) else y
