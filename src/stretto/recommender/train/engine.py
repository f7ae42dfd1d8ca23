"""One rank of a recommender: replicated dense networks, sharded tables, and the training step.

The loss is the mean over the global batch: each rank has the share of its samples, and gradients are summed
over ranks. So nothing is divided by the number of ranks, and a table's gradient does not depend on its
placement.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import AllreduceOptions, ProcessGroup, Work

from stretto.engine.device import moved
from stretto.engine.optim.build import build_optimizer
from stretto.engine.optim.norm import finite
from stretto.engine.optim.states import prepare, state_tensors
from stretto.engine.parallel.fragment import ParameterFragment, ShardPlacement, unsharded_fragments
from stretto.engine.parallel.mesh import make_group
from stretto.job.optimiser import Optimiser
from stretto.recommender.clicks.batch import ClickBatch
from stretto.recommender.config.schema import RecommenderConfig
from stretto.recommender.models.dlrm import DenseNet, initialise_dense
from stretto.recommender.optim.rules import build_rule, options_of
from stretto.recommender.optim.updater import PoolGradient, TableUpdater, gradients_by_shard
from stretto.recommender.placement import Placements, TableSpec
from stretto.recommender.tables.kernels.cpu import kernels_for
from stretto.recommender.tables.pools import LocalShard
from stretto.recommender.tables.sharded import ShardedTables, TableBatch

SUMMED = ", once summed over ranks"  # of a gradient that was finite on this rank


class _Bucket:
    """Gradients that are all-reduced together: with several ranks, views of one flat tensor."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: ProcessGroup | None) -> None:
        self.parameters, self._group = parameters, group
        self._work: Work | None = None
        self._norms = torch.empty(0)  # the norm of each gradient before the sum
        self._flat = torch.empty(0)
        if group is not None:
            first = parameters[0]
            self._flat = torch.zeros(
                sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device
            )

    def clear(self) -> None:
        """Clears the gradients before a backward pass."""
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
        """Start the sum over ranks."""
        if self._group is not None:
            with torch.no_grad():
                self._norms = torch.stack(
                    torch._foreach_norm([p.grad for p in self.parameters if p.grad is not None])
                )
            self._work = self._group.allreduce([self._flat], AllreduceOptions())

    def own_bad(self) -> list[nn.Parameter]:
        """The parameters whose gradient was not finite on this rank before the sum."""
        if self._group is None:
            return [p for p in self.parameters if p.grad is not None and not finite([p.grad])]
        return [
            p for p, good in zip(self.parameters, self._norms.isfinite().tolist(), strict=True) if not good
        ]

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None


class DenseReplica:
    """The dense networks of one rank with their optimiser.

    Args:
        group: of all ranks; None: there is only this one.
    """

    def __init__(self, net: DenseNet, optimiser: Optimiser, group: ProcessGroup | None) -> None:
        self.net, self._peak = net, optimiser.lr
        bottom = list(net.bottom.parameters())
        ids = {id(parameter) for parameter in bottom}
        above = [parameter for parameter in net.parameters() if id(parameter) not in ids]
        self.bottom, self.above = _Bucket(bottom, group), _Bucket(above, group)
        self.optimizer = build_optimizer(net.named_parameters(), optimiser)

    def clear(self) -> None:
        """Clears the gradients before a backward pass."""
        self.bottom.clear()
        self.above.clear()

    def wait(self) -> None:
        """Wait until the gradients are reduced."""
        self.above.wait()
        self.bottom.wait()

    def norm_squared(self) -> Tensor:
        """Return the squared norm of the gradients, the same on every rank."""
        grads = [p.grad for p in self.net.parameters() if p.grad is not None]
        return torch.stack([grad.double().square().sum() for grad in grads]).sum()

    def update(self, factor: float, scale: float = 1.0) -> None:
        """One step at the peak learning rate times `factor`, with gradients times `scale`."""
        for group in self.optimizer.param_groups:
            group["lr"] = self._peak * factor
        if scale != 1.0:
            torch._foreach_mul_([p.grad for p in self.net.parameters() if p.grad is not None], scale)
        self.optimizer.step()

    def prepare(self, updates: int) -> None:
        """Create zero states, as after `updates` updates, for a checkpoint to be loaded into."""
        prepare(self.optimizer, self._fragments(), updates)

    def tensors(self) -> Iterable[tuple[str, str, Tensor, ShardPlacement]]:
        """For each parameter and state: the state's name or "", the parameter's, the tensor, its place."""
        if not self.optimizer.state:
            self.prepare(0)
        for fragment in self._fragments():
            yield "", fragment.name, fragment.parameter.detach(), fragment.placed
            for key, (value, place) in state_tensors(self.optimizer, fragment).items():
                yield key, fragment.name, value, place

    def _fragments(self) -> list[ParameterFragment]:
        return unsharded_fragments(self.net.named_parameters())


_TYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


class Recommender:
    """One rank of a job, on the default process group if there is one. Every rank makes the same calls in the
    same order. Creating it is collective.

    Args:
        tables: one for each feature.
        placements: of the stored tables.
        fresh: set initial values; otherwise a checkpoint is loaded afterwards.
        record: keep the tables' gradients of each step.
        folder: for tables on disk.

    Attributes:
        updates: steps made, including those before a resume.
        recorded: with `record`, the tables' gradients of the last step: for each shard its local rows [u]
            and their gradient [u, width].
        looked_up: with `record`, the pooled vectors of the last step, [samples, features, dim].
    """

    def __init__(
        self,
        config: RecommenderConfig,
        tables: Sequence[TableSpec],
        placements: Placements,
        device: torch.device | str = "cpu",
        *,
        fresh: bool = True,
        record: bool = False,
        folder: Path | None = None,
    ) -> None:
        self.config, self.record = config, record
        world = dist.get_world_size() if dist.is_initialized() else 1
        rank = dist.get_rank() if world > 1 else 0
        timeout = timedelta(seconds=config.train.timeout_s)
        groups = [make_group(list(range(world)), timeout) if world > 1 else None for _ in range(3)]
        self._groups: list[ProcessGroup | None] = groups
        dtype, seed = _TYPES[config.train.dtype], config.train.seed
        self.net = DenseNet(config.shape(tables)).to(device=device, dtype=dtype)
        if fresh:
            initialise_dense(self.net, seed)
        settings = config.optim.tables
        options = {"eps": settings.eps, "beta1": settings.betas[0], "beta2": settings.betas[1]}
        rule = build_rule(settings.name, **{name: options[name] for name in options_of(settings.name)})
        self.rule = rule
        self.tables = ShardedTables(
            tables,
            placements,
            kernels_for(device, dtype),
            rank=rank,
            world=world,
            requests=groups[0],
            vectors=groups[1],
            dtype=dtype,
            weights=rule.weight_dtype(dtype),
            wire_dtype=dtype if dtype == torch.float64 else _TYPES[config.tables.wire],
            device=device,
            states=rule.state_specs(dtype),
            encode=rule.encode,
            seed=seed,
            fresh=fresh,
            folder=folder,
        )
        self.dense = DenseReplica(self.net, config.dense_optimiser(), groups[2])
        self._updater = TableUpdater(self.tables, rule, groups[1])
        self._pending: tuple[ClickBatch, TableBatch] | None = None  # of the next step
        self._sent_finite = self._stored_finite = torch.tensor(True)
        self._following: tuple[ClickBatch, TableBatch] | None = None
        # of the step in progress: its lookups, and the tables' gradients if they are summed before the update
        self._lookups: TableBatch | None = None
        self._summed: list[PoolGradient] | None = None
        self.updates = 0
        self.recorded = list[tuple[LocalShard, Tensor, Tensor]]()
        self.looked_up: Tensor | None = None

    @property
    def local_shards(self) -> list[LocalShard]:
        """This rank's shards of tables."""
        return self.tables.local_shards

    def forward_backward(self, batch: ClickBatch, following: ClickBatch | None = None) -> Tensor:
        """Compute loss and gradients of this rank's samples of a global batch. Collective.

        Args:
            following: the samples of the next step, whose ids are exchanged meanwhile.

        Returns:
            This rank's share of the loss: the sum over ranks is the mean over the global batch.
        """
        lookups, overlap = self._table_batch(batch), self.config.tables.overlap
        device = self.tables.device
        dense, labels = moved(batch.dense, device).to(self.tables.dtype), moved(batch.labels, device)
        if self.tables.hashed:
            self.tables.evict(self.updates)
        lookups.send_rows()
        lookups.fetch()
        coming = None
        if following is not None and overlap:
            coming = self.tables.begin(following.ids.to(device), step=self.updates + 1)
        self.dense.clear()
        lookups.answer()
        x = self.net.bottom(dense) if overlap else None
        vectors = lookups.vectors().requires_grad_()
        if self.record:
            self.looked_up = vectors.detach().clone()
        x = self.net.bottom(dense) if x is None else x
        if coming is not None:
            coming.send_rows()
        logits = self.net.score(x, vectors)
        loss = F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="sum")
        loss = loss / self.config.batch.global_size
        if coming is not None and not self.tables.hashed:
            coming.fetch()
        vectors.register_post_accumulate_grad_hook(lambda tensor: self._on_vector_gradient(lookups, tensor))
        loss.backward()
        self.dense.bottom.reduce()
        for requested in lookups.lookups:
            requested.grouped()  # while gradients are being received
        lookups.receive_gradient()
        self._lookups = lookups
        self._following = None if coming is None or following is None else (following, coming)
        return loss.detach()

    def gradient_norm(self) -> float | None:
        """The norm of all gradients, tables included, before clipping; None if neither clipping nor a record
        needs it. Collective.
        """
        assert self._lookups is not None, "no step is under way"
        if self.config.optim.clip is None and not self.record:
            self.dense.wait()
            return None
        with torch.no_grad():
            self._summed = self._updater.pool_gradients(self._lookups)
            if self.record:
                self.recorded = gradients_by_shard(self._summed)
            self.dense.wait()
            squares = self._updater.norm_squared(self._summed)
            if self._groups[2] is not None:
                dist.all_reduce(squares, group=self._groups[2])
            return float(squares + self.dense.norm_squared()) ** 0.5

    def update(self, factor: float, norm: float | None, apply: bool = True) -> None:
        """Clip the gradients and apply them, or drop them; this ends the step.

        Args:
            factor: of the peak learning rates.
            norm: what `gradient_norm` returned.
            apply: the same on every rank.
        """
        lookups, summed = self._lookups, self._summed
        clip = self.config.optim.clip
        assert lookups is not None, "no step is under way"
        rate, scale = self.config.optim.tables.lr * factor, 1.0
        if clip is not None and norm is not None:
            scale = min(1.0, clip / (norm + 1e-6))
        if apply:
            with torch.no_grad():
                if summed is None:
                    self._updater.update(lookups, rate)
                else:
                    self._updater.apply(summed, rate, scale)
            self.dense.update(factor, scale)
        elif summed is None:
            lookups.refuse()
        lookups.release()
        self.updates += 1
        self._pending, self._following = self._following, None
        self._lookups = self._summed = None

    def _table_batch(self, batch: ClickBatch) -> TableBatch:
        """The batch's lookups, begun now unless they were prefetched."""
        pending, self._pending = self._pending, None
        if pending is not None:
            if pending[0] is batch:
                return pending[1]
            pending[1].drop()
        return self.tables.begin(batch.ids.to(self.tables.device), step=self.updates)

    def _on_vector_gradient(self, lookups: TableBatch, vectors: Tensor) -> None:
        """Run during the backward pass, before that of the bottom network."""
        assert vectors.grad is not None
        self._sent_finite = finite([vectors.grad])
        lookups.send_gradient(vectors.grad)
        vectors.grad = None
        self.dense.above.reduce()

    def finite_gradients(self) -> Tensor:
        """True if `bad_gradient` is None; on the device, so that the host need not wait for it."""
        assert self._lookups is not None, "no step is under way"
        arrived = self._lookups.lookups if self.config.tables.wire == "float16" else []
        self._stored_finite = finite([each.gradient for each in arrived if each.gradient is not None])
        dense = finite([p.grad for p in self.net.parameters() if p.grad is not None])
        return self._sent_finite & self._stored_finite & dense

    def bad_gradient(self) -> str | None:
        """The first gradient of this rank that is not finite, or None: of what it looked up, of the rows that
        it stores, if they may have overflowed on the way, or of the dense networks.
        """
        if self.finite_gradients():
            return None
        if not self._sent_finite:
            return "of the rows looked up"
        if not self._stored_finite:
            return "of the rows stored"
        named = {name: p for name, p in self.net.named_parameters() if p.grad is not None}
        spoiled = {id(p) for bucket in (self.dense.above, self.dense.bottom) for p in bucket.own_bad()}
        if bad := [name for name, p in named.items() if id(p) in spoiled]:
            return f"of {bad[-1]}"  # where the backward begins
        return next(
            (f"of {n}{SUMMED}" for n, p in named.items() if p.grad is not None and not finite([p.grad])), None
        )

    @torch.no_grad()
    def predict(self, batch: ClickBatch) -> Tensor:
        """Logits [samples] of this rank's samples. Collective, also for ranks without samples."""
        lookups = self.tables.begin(batch.ids.to(self.tables.device), train=False, step=self.updates)
        lookups.send_rows()
        lookups.fetch()
        lookups.answer()
        dense = moved(batch.dense, self.tables.device).to(self.tables.dtype)
        logits = self.net.score(self.net.bottom(dense), lookups.vectors())
        lookups.release()
        return logits

    def forget_next(self) -> None:
        """Abandon the lookups of the next step that were begun. Collective."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending[1].drop()

    def close(self) -> None:
        """Free memory, files and process groups."""
        self.forget_next()
        self.tables.close()
        for group in self._groups:
            if group is not None:
                dist.destroy_process_group(group)
        self._groups = [None] * len(self._groups)
