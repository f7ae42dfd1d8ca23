"""The parameters of any parallel model by their names in the plain one, and what makes each of them whole.

A parameter is recognised by its module: `fully_shard`, `parallelize_module`, DDP and a cut into stages
replace or wrap parameters, but leave the modules of the model that they were handed. Where a model was built
anew, its names are compared instead, without what wrappers add.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, distribute_tensor

from stretto.engine.parallel.collectives import all_sum
from stretto.engine.parallel.control import gather_json
from stretto.engine.parallel.parallelize import SPLIT_RECORD, SplitRecord
from stretto.errors import StrettoError, nearest

WRAPPERS = {"module", "_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"}


@dataclass(frozen=True)
class Split:
    """Each rank of a group holds a part of a parameter along one dimension, in the order of the ranks.

    dim: of the parameter.
    group: of the ranks; None: all ranks.
    parts: sizes, in the plain model, of tensors that are fused along `dim`, such as query, key and value, or
        gate and up; each of them is split over the ranks on its own.
    """

    dim: int = 0
    group: ProcessGroup | None = None
    parts: Sequence[int] = ()

    def full_tensor(self, local: Tensor) -> Tensor:
        """Return the full tensor of all ranks' parts. Collective over the group."""
        shares = _gathered(local.movedim(self.dim, 0).contiguous(), self.group)
        if self.parts:
            cut = [share.split([size // len(shares) for size in self.parts]) for share in shares]
            return torch.cat([part for fused in zip(*cut, strict=True) for part in fused]).movedim(
                0, self.dim
            )
        return torch.cat(shares).movedim(0, self.dim)

    def part(self, full: Tensor) -> Tensor:
        """Return this rank's part of a full tensor."""
        ranks, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        fused = full.split(list(self.parts), self.dim) if self.parts else (full,)
        return torch.cat([tensor.tensor_split(ranks, self.dim)[rank] for tensor in fused], self.dim)


def _gathered(local: Tensor, group: ProcessGroup | None) -> list[Tensor]:
    """Return every rank's tensor; they may differ in the size of the first dimension. Collective."""
    rows = [torch.zeros(1, dtype=torch.int64, device=local.device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, torch.tensor([len(local)], device=local.device), group)
    sizes = [int(row) for row in rows]
    padded = local.new_zeros(max(sizes), *local.shape[1:])
    padded[: len(local)] = local
    shares = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(shares, padded, group)
    return [share[:size] for share, size in zip(shares, sizes, strict=True)]


@dataclass(frozen=True)
class Pieces:
    """A parameter that `stretto.parallelize` has split by a sharding plan."""

    record: SplitRecord

    def full_tensor(self, local: Tensor) -> Tensor:
        """Return the full tensor of the pieces that ranks own. Collective over the ranks of one copy."""
        full = local.new_zeros(self.record.placed.shape)
        for piece in self.record.placed.pieces:
            if piece.owned:
                piece.of_full(full).copy_(piece.of_local(local))
        return all_sum(full, self.record.group)


Rule = Split | Pieces | Callable[[Tensor], Tensor]
Names = Mapping[str, str] | Callable[[str], str]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A parameter or buffer that this rank holds.

    name: in the plain model; of tied parameters, the first.
    local: its name in the parallel model, or in one of several modules.
    """

    name: str
    local: str
    tensor: Tensor
    rule: Rule | None

    @property
    def key(self) -> int:
        """Identifies the entry among those of this rank."""
        return id(self.tensor)

    @property
    def is_shared(self) -> bool:
        """True if its full tensor is spread over several ranks."""
        return isinstance(self.tensor, DTensor) or self.rule is not None

    def full_tensor(self, tensor: Tensor) -> Tensor:
        """Return the full tensor of one that is split like this one: itself, a gradient or a state. It is in
        float64 on the CPU. Collective over the ranks that share it.
        """
        weight, tensor = tensor is self.tensor, tensor.detach()
        if deepspeed := _deepspeed(self.tensor):  # its gradients come whole
            tensor = deepspeed.safe_get_full_fp32_param(self.tensor) if weight else tensor
        elif isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        elif isinstance(self.tensor, DTensor) and tensor.shape == self.tensor.to_local().shape:
            tensor = DTensor.from_local(
                tensor,
                self.tensor.device_mesh,
                self.tensor.placements,
                shape=self.tensor.shape,
                stride=self.tensor.stride(),
            ).full_tensor()
        elif isinstance(self.rule, Split | Pieces):
            tensor = self.rule.full_tensor(tensor)
        elif self.rule is not None:
            tensor = self.rule(tensor)
        return tensor.to("cpu", torch.float64)

    @torch.no_grad()
    def load(self, full: Tensor) -> None:
        """Overwrite it with its part of a whole tensor.

        Raises:
            StrettoError: its rule gathers only.
        """
        full = full.to(self.tensor.device, self.tensor.dtype)
        if isinstance(self.tensor, DTensor):
            self.tensor.copy_(distribute_tensor(full, self.tensor.device_mesh, self.tensor.placements))
        elif isinstance(self.rule, Split):
            self.tensor.copy_(self.rule.part(full))
        elif isinstance(self.rule, Pieces):
            self.rule.record.placed.fill(self.tensor, full)
        elif self.rule is not None or full.shape != self.tensor.shape:
            raise StrettoError(
                f"{self.local} cannot be loaded with the plain model's {self.name}: its rule gathers only",
                hint="give a Split, or load the weights in parallel()",
            )
        else:
            self.tensor.copy_(full)

    def gradient(self) -> Tensor | None:
        """Return the gradient that the optimiser uses: `grad`, or Megatron's `main_grad`."""
        if deepspeed := _deepspeed(self.tensor):
            return deepspeed.safe_get_full_grad(self.tensor)
        if self.tensor.grad is None and isinstance(main := getattr(self.tensor, "main_grad", None), Tensor):
            return main
        return self.tensor.grad


@dataclass(frozen=True)
class PlainNames:
    """The plain model's names.

    canonical: of parameters and buffers, by each name they go under.
    shapes: by canonical name.
    parameters: canonical names, without buffers.
    modules: the path of each module of the copy that was handed to `parallel`, by identity; the modules are
        kept with it, so that no other object takes their identity.
    """

    canonical: Mapping[str, str]
    shapes: Mapping[str, torch.Size]
    parameters: Sequence[str]
    modules: Mapping[int, tuple[str, nn.Module]]

    @classmethod
    def of(cls, model: nn.Module, handed: nn.Module) -> PlainNames:
        """Return the names of the plain model and of its copy for `parallel`, before that is changed."""
        first, canonical = dict[int, str](), dict[str, str]()
        shapes = dict[str, torch.Size]()
        for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()):
            canonical[name] = first.setdefault(id(tensor), name)
            shapes[canonical[name]] = tensor.shape
        parameters = [name for name, _ in model.named_parameters()]
        modules = {id(module): (path, module) for path, module in handed.named_modules()}
        return cls(canonical, shapes, parameters, modules)

    @property
    def tied(self) -> list[str]:
        """Canonical names of the parameters that have several names."""
        names = list(self.canonical.values())
        return sorted({name for name in names if names.count(name) > 1})

    def path_of(self, module: nn.Module, local: str) -> str:
        """The path of a module of the parallel model in the plain one."""
        if id(module) in self.modules:
            return self.modules[id(module)][0]
        return ".".join(word for word in local.split(".") if word not in WRAPPERS)


def modules_in(built: Any) -> list[nn.Module]:
    """The modules in what `parallel` returned: a module, a stage or a schedule of
    torch.distributed.pipelining, or several of them.

    Raises:
        StrettoError: none is in it.
    """
    modules = list(_modules_in(built))
    if not modules:
        raise StrettoError(
            f"parallel() returned {type(built).__name__}, in which there is no module",
            hint="return the parallel module, a pipeline stage or schedule, or a list of them",
        )
    return modules


def _modules_in(built: Any) -> Iterator[nn.Module]:
    if isinstance(built, nn.Module):
        yield built
    elif isinstance(built, Mapping):
        for item in cast(Mapping[Any, Any], built).values():
            yield from _modules_in(item)
    elif isinstance(built, list | tuple):
        for item in cast(Sequence[Any], built):
            yield from _modules_in(item)
    else:
        for attribute in ("submod", "_stage", "_stages"):
            if (inner := getattr(built, attribute, None)) is not None:
                yield from _modules_in(inner)


class Holdings:
    """The parameters and buffers of the plain model that this rank holds.

    Attributes:
        parameters, buffers: in the order of the parallel model; a tensor that several names share is there
            once.
        paths: every module of this rank, by its path in the plain model.
    """

    def __init__(
        self, modules: Sequence[nn.Module], plain: PlainNames, gather: Mapping[str, Rule], names: Names | None
    ) -> None:
        self._plain, self._gather = plain, gather
        self._names = names
        self.parameters, self.buffers = list[Entry](), list[Entry]()
        self.paths = list[tuple[str, nn.Module]]()
        visited = set[int]()
        for root in modules:
            _refuse_flat(root)
            for local, module in root.named_modules():
                path = plain.path_of(module, local)
                self.paths.append((path, module))
                for kind, entries in ((module._parameters, self.parameters), (module._buffers, self.buffers)):
                    for key, tensor in kind.items():
                        if tensor is None or id(tensor) in visited:
                            continue
                        visited.add(id(tensor))
                        if (entry := self._entry(f"{path}.{key}", f"{local}.{key}", tensor)) is not None:
                            entries.append(entry)

    def _entry(self, path: str, local: str, tensor: Tensor) -> Entry | None:
        path, local = path.strip("."), local.strip(".")
        renamed = None if self._names is None else _renamed(self._names, local)
        stripped = ".".join(word for word in local.split(".") if word not in WRAPPERS)
        canonical = self._plain.canonical
        candidates = (renamed or path, path, local, stripped)
        name = next((canonical[candidate] for candidate in candidates if candidate in canonical), None)
        if name is None:
            if not isinstance(tensor, nn.Parameter):
                return None  # a buffer of the parallel code's, such as a mask
            suggestion = nearest(stripped, canonical)
            raise StrettoError(
                f"the parallel model's parameter {local} is not in the plain model",
                hint=f"give names={{{local!r}: {suggestion or 'NAME IN THE PLAIN MODEL'!r}}}",
            )
        entry = Entry(name=name, local=local, tensor=tensor, rule=self._rule(name, local, tensor))
        self._check_shape(entry)
        return entry

    def _rule(self, name: str, local: str, tensor: Tensor) -> Rule | None:
        for pattern, rule in self._gather.items():
            if fnmatchcase(name, pattern) or fnmatchcase(local, pattern):
                return rule
        if isinstance(record := getattr(tensor, SPLIT_RECORD, None), SplitRecord):
            return Pieces(record)
        parallel = sys.modules.get("megatron.core.parallel_state")
        if parallel is not None and getattr(tensor, "tensor_model_parallel", False):
            return Split(
                cast(Any, tensor).partition_dim, cast(Any, parallel).get_tensor_model_parallel_group()
            )
        return None

    def _check_shape(self, entry: Entry) -> None:
        expected, actual = self._plain.shapes[entry.name], entry.tensor.shape
        if actual == expected or entry.rule is not None or _deepspeed(entry.tensor):
            return
        unequal = [dim for dim, (a, b) in enumerate(zip(actual, expected, strict=False)) if a != b]
        dim = unequal[0] if len(actual) == len(expected) and len(unequal) == 1 else "DIM"
        raise StrettoError(
            f"{entry.local} is {list(actual)} on a rank and {list(expected)} in the plain model, "
            "and it is no DTensor, so nothing says how to make it whole",
            hint=f"give gather={{{entry.name!r}: Split({dim})}}, with the group of the ranks that share it",
        )

    def check_complete(self) -> None:
        """Every parameter of the plain model must be on some rank. Collective.

        Raises:
            StrettoError: one is not.
        """
        holdings: list[list[str]] = gather_json([entry.name for entry in self.parameters])
        everywhere = {name for names in holdings for name in names}
        missing = [name for name in self._plain.parameters if name not in everywhere]
        if missing:
            raise StrettoError(
                f"no rank holds {missing[0]} of the plain model"
                + (f", nor {len(missing) - 1} more" if len(missing) > 1 else ""),
                hint="return every module of this rank from parallel()",
            )


def _deepspeed(tensor: Tensor) -> Any:
    """DeepSpeed's functions that make a parameter of its engine whole; None if it is not DeepSpeed's."""
    if "deepspeed" in sys.modules and (hasattr(tensor, "ds_id") or hasattr(tensor, "_hp_mapping")):
        return sys.modules["deepspeed"].utils
    return None


def _refuse_flat(root: nn.Module) -> None:
    for module in root.modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise StrettoError(
                "FullyShardedDataParallel flattens its parameters, so none can be compared by name",
                hint="shard with torch.distributed.fsdp.fully_shard, which replaces it",
            )


def _renamed(names: Names, local: str) -> str | None:
    """The plain name of a local one by the user's rule; a `*` stands for the same text on both sides."""
    if callable(names):
        return names(local)
    for pattern, plain in names.items():
        if match := re.fullmatch(re.escape(pattern).replace(r"\*", "(.*)"), local):
            for text in match.groups():
                plain = plain.replace("*", text, 1)
            return plain
    return None
