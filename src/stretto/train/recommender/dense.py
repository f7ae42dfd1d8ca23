"""The dense networks of a recommender on one rank: copies whose gradients are summed over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import AllreduceOptions, ProcessGroup, Work

from stretto.config.schema import OptimConfig
from stretto.models.dlrm import DenseNet
from stretto.optim.build import build_optimizer
from stretto.optim.states import prepare, state_tensors
from stretto.parallel.fragment import Fragment, whole_fragments
from stretto.parallel.placed import Placed


class _Bucket:
    """Gradients that are reduced at once: views of one flat tensor, where there are several ranks."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: ProcessGroup | None) -> None:
        self.parameters, self._group = parameters, group
        self._work: Work | None = None
        self._flat = torch.empty(0)
        if group is not None:
            first = parameters[0]
            self._flat = torch.zeros(
                sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device
            )

    def clear(self) -> None:
        """Before a backward."""
        if self._group is None:
            for parameter in self.parameters:
                parameter.grad = None
            return
        self._flat.zero_()
        at = 0
        for parameter in self.parameters:
            parameter.grad = self._flat[at : at + parameter.numel()].view_as(parameter)
            at += parameter.numel()

    def reduce(self) -> None:
        """Begin the sum over ranks."""
        if self._group is not None:
            self._work = self._group.allreduce([self._flat], AllreduceOptions())

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None


class DenseReplica:
    """The networks with their optimiser.

    Args:
        group: of all ranks; None: this one alone.
    """

    def __init__(self, net: DenseNet, config: OptimConfig, group: ProcessGroup | None) -> None:
        self.net, self._peak = net, config.lr
        first = list(net.bottom.parameters())
        known = {id(parameter) for parameter in first}
        later = [parameter for parameter in net.parameters() if id(parameter) not in known]
        self.bottom, self.above = _Bucket(first, group), _Bucket(later, group)
        self.optimizer = build_optimizer(net.named_parameters(), config)

    def clear(self) -> None:
        """Before a backward."""
        self.bottom.clear()
        self.above.clear()

    def wait(self) -> None:
        """Until gradients are whole."""
        self.above.wait()
        self.bottom.wait()

    def norm_squared(self) -> Tensor:
        """Of the gradients, the same on every rank."""
        grads = [p.grad for p in self.net.parameters() if p.grad is not None]
        return torch.stack([grad.double().square().sum() for grad in grads]).sum()

    def update(self, factor: float, scale: float = 1.0) -> None:
        """One step at the peak rate times `factor`, of gradients times `scale`."""
        for group in self.optimizer.param_groups:
            group["lr"] = self._peak * factor
        if scale != 1.0:
            torch._foreach_mul_([p.grad for p in self.net.parameters() if p.grad is not None], scale)
        self.optimizer.step()

    def prepare(self, updates: int) -> None:
        """States of zeros, as after so many updates, for a checkpoint to be read into."""
        prepare(self.optimizer, self._fragments(), updates)

    def tensors(self) -> Iterable[tuple[str, str, Tensor, Placed]]:
        """Of each parameter and state: the state's name or "", the parameter's, the tensor and its place."""
        if not self.optimizer.state:
            self.prepare(0)
        for fragment in self._fragments():
            yield "", fragment.name, fragment.parameter.detach(), fragment.placed
            for key, (value, place) in state_tensors(self.optimizer, fragment).items():
                yield key, fragment.name, value, place

    def _fragments(self) -> list[Fragment]:
        return whole_fragments(self.net.named_parameters())
