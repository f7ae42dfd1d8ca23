"""Data parallelism, in every mode from ddp to zero3, for any module and training loop."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stretto.engine.optim.build import build_optimizer
from stretto.engine.optim.norm import GradientNorm, clip
from stretto.engine.optim.sharded_optimizer import ShardedOptimizer
from stretto.engine.parallel.data.buffers import SharedBuffers, check_alike
from stretto.engine.parallel.data.gradients import BUCKET_BYTES
from stretto.engine.parallel.data.layer_gather import LayerGather, tensors_in
from stretto.engine.parallel.data.sharded import ShardedStates
from stretto.engine.parallel.fragment import ParameterFragment, ShardPlacement
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.parallel.parallelize import SUMMED
from stretto.engine.parallel.precision import HALVES, master_dtype, stays_float32
from stretto.errors import StrettoError, nearest
from stretto.job import data_parallel as job
from stretto.job.data_parallel import MODES, Offload
from stretto.job.optimiser import Optimiser
from stretto.layout.shards import Mode

_STAGE = 0
Build = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


def data_parallel(
    module: nn.Module,
    mesh: Mesh,
    mode: Mode = "ddp",
    *,
    shard: int | None = None,
    dtype: torch.dtype | None = None,
    keep: Sequence[str] = ("*norm*",),
    offload: Offload = "none",
    offload_parameters: Offload = "none",
    path: str | None = None,
    layers: Sequence[nn.Module] | None = None,
    places: Mapping[str, ShardPlacement] | None = None,
    bucket_mib: float = BUCKET_BYTES / 2**20,
) -> DataParallel:
    """Train `module` on the data-parallel ranks of a mesh (those of dp and cp); see `DataParallel`.
    Collective.

    Args:
        module: module with initial values; the first rank's are broadcast to all. Changed in place.
        mode: `server`, `ddp`, `zero1`, `zero2` or `zero3`.
        shard: number of ranks that share one copy of the sharded tensors; by default all.
        dtype: torch.bfloat16 or torch.float16: dtype of the weights, with float32 masters; by default
            unchanged.
        keep: name patterns of parameters that stay in float32 among such weights.
        offload: location of optimiser states and updates: "none", "cpu", or "nvme" under `path`.
        offload_parameters: with zero3, location of a rank's shard of the parameters.
        layers: with zero3, modules that are gathered one at a time, in the order of their use; by default the
            members of the module's longest nn.ModuleList or nn.Sequential. All other parameters stay
            gathered during an entire forward and an entire backward.
        places: placements of parameters that `parallelize` has split, by name.
        bucket_mib: size of a gradient bucket in MiB.

    Raises:
        StrettoError: the mode is unknown, sizes do not divide, the dtype needs no masters, an offload lacks
            its path or mode, or ranks have different parameters or buffers.
    """
    copies = mesh.size("cp-dp")
    if mode not in MODES:
        suggestion = nearest(mode, MODES)
        raise StrettoError(
            f"mode is {mode!r}", hint=f"did you mean {suggestion!r}?" if suggestion else ", ".join(MODES)
        )
    if shard is not None and (shard < 1 or copies % shard):
        raise StrettoError(
            f"shard is {shard}, must divide the {copies} data-parallel ranks", hint="shard=None"
        )
    if dtype is not None and dtype not in HALVES:
        raise StrettoError(f"dtype is {dtype}", hint="torch.bfloat16, torch.float16 or None")
    if "nvme" in (offload, offload_parameters) and path is None:
        raise StrettoError("offload to nvme needs a path", hint="path='/local/disk/scratch'")
    if offload_parameters != "none" and mode != "zero3":
        raise StrettoError(f"offload_parameters is {offload_parameters} with {mode}", hint="mode='zero3'")
    dp = job.DataParallelSettings(
        mode=mode,
        shard_states=shard,
        offload=offload,
        offload_parameters=offload_parameters,
        path=path,
    )
    summed = [name for name, p in _trained(module) if getattr(p, SUMMED, False)]
    if mode != "ddp" and summed:
        raise StrettoError(
            f"the gradient of {summed[0]} must also be summed over tp ranks, which {mode} does not do",
            hint="mode='ddp', and sum_gradients(model, table) after backward",
        )
    types = {
        name: p.dtype if dtype is None or stays_float32(name, keep) else dtype for name, p in _trained(module)
    }
    return DataParallel(
        module=module,
        mesh=mesh,
        dp=dp,
        dtype=dtype,
        types=types,
        layers=layers,
        places=places or {},
        bucket_bytes=int(bucket_mib * 2**20),
    )


def _trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]


class DataParallel(nn.Module):
    """A module with gradients averaged, and states sharded, over data-parallel ranks.

        model = data_parallel(model, mesh, "zero2")
        optimizer = model.optimizer("adamw", lr=1e-3)
        loss_function(model(x), y).backward()
        optimizer.clip(1.0)
        optimizer.step()
        optimizer.zero_grad()

    The loss on each rank is the mean over that rank's samples, equally many on all, as with torch's
    DistributedDataParallel. Only `optimizer` may change weights. Buffers, such as the running statistics of
    BatchNorm, are those of the first rank: as with DistributedDataParallel they are broadcast before a
    forward, including in evaluation, but not between the forwards that `accumulate` groups. So all ranks must
    call the module equally often.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        dp: job.DataParallelSettings,
        dtype: torch.dtype | None,
        types: Mapping[str, torch.dtype],
        layers: Sequence[nn.Module] | None,
        places: Mapping[str, ShardPlacement],
        bucket_bytes: int,
    ) -> None:
        super().__init__()
        self.module, self.mesh = module, mesh
        check_alike(module, mesh)
        named = dict(_trained(module))
        values = {name: _from_first(p.detach().clone(), mesh) for name, p in named.items()}
        for frozen in (p.detach() for p in module.parameters() if not p.requires_grad):
            _from_first(frozen, mesh)
        self._shared_buffers = SharedBuffers(module, mesh)
        for name, parameter in named.items():
            parameter.data = parameter.data.to(types[name])
        placed_by_name = {
            name: places.get(name) or ShardPlacement.unsharded(name, tuple(p.shape))
            for name, p in named.items()
        }
        over = sorted({placed.over for placed in placed_by_name.values()})
        self.states = ShardedStates(
            mesh,
            named,
            placed_by_name,
            over,
            dp,
            master=None if dtype is None else master_dtype(dtype),
            gradients=None if dtype is None else torch.float32,
            each_microbatch=dp.mode in ("zero2", "zero3"),
            bucket_bytes=bucket_bytes,
        )
        self._over = over
        inner = list(layers) if layers is not None else _layers(module)
        inside = {id(p) for layer in inner for p in layer.parameters()}
        outer = [p for p in named.values() if id(p) not in inside]
        ordered = [*outer, *(p for p in named.values() if id(p) in inside)]
        self.buffer = self.states.buffer(_STAGE, ordered, [module, *inner] if outer else inner)
        self._hooks = self._gather_hooks(module, inner)
        self._accumulating = self._running = self.reduced = False
        self._scale = 1.0 / mesh.size("cp-dp")
        self.fragments = list(self.states.begin(values.__getitem__))

    def _gather_hooks(self, module: nn.Module, inner: Sequence[nn.Module]) -> list[LayerGather]:
        """Register hooks that gather the weights of each inner layer, and all other weights of the module."""
        units = self.states.units[_STAGE]
        if all(unit.plain for unit in units):
            return []
        unit_of = {id(p): unit for unit in units for p in unit.parameters}
        by_layer = [
            list(
                {id(unit_of[id(p)]): unit_of[id(p)] for p in layer.parameters() if id(p) in unit_of}.values()
            )
            for layer in inner
        ]
        covered = {id(unit) for layer_units in by_layer for unit in layer_units}
        uncovered = [unit for unit in units if id(unit) not in covered]
        gathers = [LayerGather(inner, by_layer)] if inner else []
        return [*gathers, LayerGather([module], [uncovered], ahead=False)]

    # ------------------------------------------------------------------ running

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the wrapped module's forward."""
        self._shared_buffers.before_forward()
        out = self.module(*inputs, **named)
        self._shared_buffers.after_forward(self._accumulating)
        if torch.is_grad_enabled():
            for tensor in tensors_in(out):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: self._begin_backward())
        return out

    @contextmanager
    def accumulate(self) -> Generator[None]:
        """For gradient accumulation: backwards within this context are not the step's last. If gradients are
        not sharded, they accumulate without a reduction.
        """
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def _begin_backward(self) -> None:
        """Prepare the gradients at the start of a backward."""
        if self._running:
            return
        if self.reduced:
            raise StrettoError(
                "a backward after the step's gradients were reduced",
                hint="optimizer.zero_grad() first, or all but the last backward in model.accumulate()",
            )
        self._running = True
        self.buffer.open()
        if not self._accumulating:
            self.buffer.arm()
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)  # pyright: ignore

    def _end_backward(self) -> None:
        """Release gathered weights and finish reductions at the end of a backward."""
        self._running = False
        for hooks in self._hooks:
            hooks.release()
        if not self._accumulating:
            self.reduced = True
            self.buffer.flush()
            self.buffer.wait()
            torch._foreach_mul_(self.buffer.flats, self._scale)

    def begin_step(self) -> None:
        """Zero the gradients."""
        self.reduced = False
        self.buffer.zero()

    # ------------------------------------------------------------------ the optimiser

    def optimizer(self, rule: str | Build = "adamw", **settings: Any) -> DataParallelOptimizer:
        """Create the optimiser of the module.

        Args:
            rule: an optimiser's name in the config (`optim.name`), with the fields of `Optimiser` (`lr`,
                `weight_decay`, ...) as `settings`; or a torch optimiser class with elementwise updates, with
                its keyword arguments.

        Raises:
            StrettoError: the name or a setting is unknown.
        """
        if isinstance(rule, str):
            fields = [name for name in Optimiser.__dataclass_fields__ if name not in ("name", "rate", "clip")]
            for name in settings:
                if name not in fields:
                    suggestion = nearest(name, fields)
                    raise StrettoError(
                        f"optimizer {rule} has no setting {name!r}",
                        hint=f"did you mean {suggestion!r}?"
                        if suggestion
                        else f"settings: {', '.join(fields)}",
                    )
            named: dict[str, Any] = {"name": rule, **settings}
            optimiser = Optimiser(**named)
            return DataParallelOptimizer(self, lambda fragments: build_optimizer(fragments, optimiser))

        def build(fragments: Sequence[ParameterFragment]) -> torch.optim.Optimizer:
            return rule([f.parameter for f in fragments if f.parameter.numel()], **settings)

        return DataParallelOptimizer(self, build)

    def make_optimizer(
        self, build: Callable[[Sequence[ParameterFragment]], torch.optim.Optimizer]
    ) -> ShardedOptimizer:
        """Return the update of all fragments with optimisers from `build`."""
        return ShardedOptimizer(
            self.fragments,
            build,
            offload=self.states.dp.offload,
            path=self.states.dp.path,
            device=self.mesh.device,
            rank=self.mesh.rank,
            copy=self.states.copy_masters,
            after=self.states.publish,
        )

    def norm(self) -> GradientNorm:
        """Return the norm of all gradients."""
        return GradientNorm(self.fragments, {axes: self.states.groups[axes].counted for axes in self._over})

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return copies of all full weights of this rank by name. Collective."""
        with self.states.full_weights() as weights:
            return {name: weight.clone() for name, weight in weights.items()}


class DataParallelOptimizer:
    """The optimiser of a `DataParallel` module: updates this rank's states, then the weights on all ranks."""

    def __init__(
        self, model: DataParallel, build: Callable[[Sequence[ParameterFragment]], torch.optim.Optimizer]
    ) -> None:
        self._model, self._norm = model, model.norm()
        self.sharded = model.make_optimizer(build)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the wrapped torch optimisers, for learning-rate schedulers."""
        return [group for optimizer in self.sharded.optimizers for group in optimizer.param_groups]

    def clip(self, largest: float) -> Tensor:
        """Clip gradients to a norm of at most `largest` over all ranks; return the norm before clipping."""
        norm = self._model.states.from_server(self._norm())
        clip(self._model.buffer.flats, norm, largest)
        return norm

    def step(self) -> None:
        """Update; the new weights may still be in transit when this returns."""
        self.sharded.step()

    def zero_grad(self) -> None:
        """Zero the gradients, for a new step."""
        self._model.begin_step()

    def close(self) -> None:
        """Stop threads and remove files."""
        self.sharded.close()
        self._model.states.close()


def _layers(module: nn.Module) -> list[nn.Module]:
    """Return the members of the longest list of modules inside."""
    lists = [m for m in module.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    longest = max(lists, key=len, default=None)
    return [] if longest is None else [m for m in longest if any(p.requires_grad for p in m.parameters())]


def _from_first(tensor: Tensor, mesh: Mesh) -> Tensor:
    """Overwrite the tensor with the first data-parallel rank's values, and return it."""
    group = mesh.group("cp-dp")
    if group is not None:
        group.broadcast([tensor]).wait()
    return tensor
