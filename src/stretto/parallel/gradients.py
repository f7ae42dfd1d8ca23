"""Gradients of a stage in one flat buffer, reduced over data-parallel ranks while the backward still runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work

from stretto.parallel.collectives import start_sum
from stretto.parallel.linear import Fused
from stretto.parallel.vocabulary import VocabEmbedding

BUCKET_BYTES = 25 * 2**20


@dataclass
class _Bucket:
    flat: Tensor
    calls: int  # gradient contributions still to come in the last backward


class GradientBuffer:
    """The gradients of some parameters, flat, in the order in which the backward makes them.

    Every `parameter.grad` is a view of the buffer, so microbatches accumulate in place and a bucket is
    reduced without a copy. Gradients are sums over tokens: the reduction is a sum and nothing is averaged.

    Once armed, a bucket is reduced as soon as its last contribution is in. How many contributions a parameter
    gets in one backward is counted in the first armed backward, which therefore reduces everything at its
    end.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        modules: Sequence[nn.Module],
        group: ProcessGroup | None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """
        Args:
            parameters: in model order.
            modules: where the parameters live; their layers report the gradients that autograd does not see.
            group: data-parallel ranks; None when there is one.
            bucket_bytes: size of a reduction; a parameter is never cut.
        """
        self.group = group
        self._of = dict[int, int]()  # bucket of each parameter, by id
        self._seen = Counter[int]()  # contributions of each bucket in one backward, once known
        self._armed = False
        self._known = False
        self._works: list[Work] = []
        self._launched = 0
        self._views = list[tuple[nn.Parameter, Tensor]]()
        if not parameters:
            self.flat = torch.empty(0)
            self._buckets: list[_Bucket] = []
            return
        self.flat = torch.zeros(
            sum(p.numel() for p in parameters), dtype=parameters[0].dtype, device=parameters[0].device
        )
        self._buckets = self._cut(parameters, bucket_bytes)
        if group is not None:
            self._listen(parameters, modules)

    def _cut(self, parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[_Bucket]:
        buckets, start, at = list[_Bucket](), 0, 0
        for parameter in reversed(parameters):
            stop = at + parameter.numel()
            parameter.grad = view = self.flat[at:stop].view_as(parameter)
            self._views.append((parameter, view))
            self._of[id(parameter)] = len(buckets)
            at = stop
            if (at - start) * self.flat.element_size() >= bucket_bytes:
                buckets.append(_Bucket(self.flat[start:at], 0))
                start = at
        if start < at:
            buckets.append(_Bucket(self.flat[start:at], 0))
        return buckets

    def _listen(self, parameters: Sequence[nn.Parameter], modules: Sequence[nn.Module]) -> None:
        fused = set[int]()
        for module in modules:
            for layer in module.modules():
                if isinstance(layer, Fused | VocabEmbedding):
                    own = [p for p in layer.fused if id(p) in self._of]
                    if own:  # all of a layer's parameters are summed over the same ranks
                        layer.on_gradient = self._ready
                    fused.update(id(p) for p in own)
        for parameter in parameters:
            if id(parameter) not in fused:
                parameter.register_post_accumulate_grad_hook(self._ready)

    def _ready(self, parameter: Tensor) -> None:
        if not self._armed:
            return
        at = self._of.get(id(parameter))
        if at is None:
            return
        if not self._known:
            self._seen[at] += 1
            return
        bucket = self._buckets[at]
        bucket.calls -= 1
        if bucket.calls < 0:
            raise RuntimeError(
                "a parameter got more gradients than in the first step, after its bucket was reduced"
            )
        while self._launched < len(self._buckets) and self._buckets[self._launched].calls == 0:
            self._launch()  # in one order on all ranks, whatever order the buckets fill in

    def _launch(self) -> None:
        if self.group is not None:
            self._works.append(start_sum(self._buckets[self._launched].flat, self.group))
        self._launched += 1

    @property
    def flats(self) -> list[Tensor]:
        """The gradients, as few flat tensors."""
        return [self.flat] if self.flat.numel() else []

    def zero(self) -> None:
        """Start a step."""
        self.flat.zero_()
        self._launched = 0
        for parameter, view in self._views:
            if parameter.grad is not view:  # `optimizer.zero_grad()` takes it away
                parameter.grad = view

    def arm(self) -> None:
        """The backward that starts now adds the last contributions of the step."""
        self._armed = True
        for at, bucket in enumerate(self._buckets):
            bucket.calls = self._seen[at] if self._known else -1

    def flush(self) -> None:
        """The last backward is done: reduce what is not under way yet."""
        while self._launched < len(self._buckets):
            self._launch()
        self._known = self._known or self._armed
        self._armed = False

    def wait(self) -> None:
        """Until every reduction is done."""
        for work in self._works:
            work.wait()
        self._works.clear()


class GradientBuffers:
    """The gradients of one stage: a buffer for each set of ranks that the parameters' gradients are summed
    over; used as one.
    """

    def __init__(self, buffers: Sequence[GradientBuffer]) -> None:
        self.buffers = list(buffers)

    @property
    def flats(self) -> list[Tensor]:
        """The gradients, as few flat tensors."""
        return [flat for buffer in self.buffers for flat in buffer.flats]

    def zero(self) -> None:
        """Start a step."""
        for buffer in self.buffers:
            buffer.zero()

    def arm(self) -> None:
        """The backward that starts now adds the last contributions of the step."""
        for buffer in self.buffers:
            buffer.arm()

    def flush(self) -> None:
        """The last backward is done: reduce what is not under way yet."""
        for buffer in self.buffers:
            buffer.flush()

    def wait(self) -> None:
        """Until every reduction is done."""
        for buffer in self.buffers:
            buffer.wait()


Groups = Callable[[nn.Parameter], ProcessGroup | None]


def buffers_of(
    parameters: Sequence[nn.Parameter],
    modules: Sequence[nn.Module],
    group_of: Groups,
    bucket_bytes: int = BUCKET_BYTES,
) -> GradientBuffers:
    """One buffer for each set of ranks.

    Args:
        group_of: the ranks that a parameter's gradient is summed over.
    """
    sets = dict[int, tuple[ProcessGroup | None, list[nn.Parameter]]]()
    for parameter in parameters:
        group = group_of(parameter)
        sets.setdefault(id(group), (group, []))[1].append(parameter)
    return GradientBuffers(
        [GradientBuffer(own, modules, group, bucket_bytes) for group, own in sets.values()]
    )
