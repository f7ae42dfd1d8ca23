"""Shards of flat units: written under one layout and one split, read under any other, bitwise the same."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from math import prod
from pathlib import Path
from zlib import crc32

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlan

from hand_layouts import cut
from ranks import on_ranks
from stretto.engine.checkpoint.load import load, tensor_index
from stretto.engine.checkpoint.save import save
from stretto.engine.checkpoint.shards import Shards, ShardsSavePlanner, shards
from stretto.engine.parallel.fragment import ShardPlacement, TensorBox
from stretto.errors import StrettoError
from stretto.layout.shards import ShardSizes, padded, shard_sizes

# one unit each: dense parameters in the order in which they are packed, and stacked experts
DENSE = {
    "embed": (13, 6),
    "qkv": (24, 6),
    "norm": (6,),
    "up": (8, 6),
    "down": (6, 8),
    "scale": (),
    "bias": (1,),
}
EXPERTS = {"experts.up": (4, 5, 6), "experts.bias": (4, 3)}

EVEN_SIZES = ShardSizes()

RankTensors = dict[str, tuple[Tensor, ShardPlacement]]


@dataclass(frozen=True)
class Cut:
    """tp fastest, then ep inside dp; what is shared over the copies of dense parameters, and of experts."""

    tp: int = 1
    dp: int = 1
    ep: int = 1
    sizes: ShardSizes = EVEN_SIZES
    dtype: torch.dtype = torch.float32


ALL, HALF = shard_sizes("zero3", 4), ShardSizes(1, 2, 2)
FOUR = [
    Cut(tp=2, dp=2),
    Cut(dp=4, sizes=ALL),
    Cut(dp=4, ep=2, sizes=ShardSizes(2, 2, 4)),
    Cut(dp=4, sizes=HALF),
    Cut(tp=2, dp=2, ep=2, sizes=shard_sizes("zero1", 2)),
    Cut(tp=4),
    Cut(dp=4, ep=4, sizes=ALL, dtype=torch.bfloat16),
]
TWO = [Cut(dp=2, sizes=shard_sizes("zero2", 2)), Cut(tp=2), Cut(dp=2, ep=2, sizes=shard_sizes("zero3", 2))]


def full(name: str) -> Tensor:
    shape = (DENSE | EXPERTS)[name]
    return torch.randn(shape, generator=torch.Generator().manual_seed(crc32(name.encode())))


def split(how: Cut, rank: int) -> list[tuple[list[tuple[str, tuple[int, ...], ShardPlacement]], int, int]]:
    """The rank's units: names with local shapes and places, how many ranks hold the same, which this one is.

    Experts lie whole on a rank, over all of tp x ep: expert parallel ranks follow each other.
    """
    tp, dp = rank % how.tp, rank // how.tp
    dense = list[tuple[str, tuple[int, ...], ShardPlacement]]()
    for name, shape in DENSE.items():
        local, pieces = cut(name, shape, how.tp, tp, tp == 0 if name in ("norm", "scale", "bias") else True)
        dense.append((name, local, ShardPlacement(name, shape, pieces)))
    ep, copies = dp % how.ep, how.dp // how.ep
    experts = list[tuple[str, tuple[int, ...], ShardPlacement]]()
    for name, shape in EXPERTS.items():
        local = (shape[0] // how.ep, *shape[1:])
        piece = TensorBox(
            offsets=(ep * local[0], *[0] * (len(shape) - 1)),
            sizes=local,
            local=(0,) * len(shape),
            owned=tp == 0,
        )
        experts.append((name, local, ShardPlacement(name, shape, (piece,), "expert_tp-ep")))
    return [(dense, how.dp, dp), (experts, copies, dp // how.ep)]


def true_state(how: Cut, rank: int) -> RankTensors:
    """What the rank holds: of each unit its slice, as views of one flat tensor; empty ones too."""
    results = RankTensors()
    for entries, copies, at in split(how, rank):
        sizes = how.sizes.for_copies(copies)
        size = padded(sum(prod(local) for _, local, _ in entries), sizes.states)
        unit = torch.zeros(size)
        start, stop = sizes.span(size, at, copies, 3)
        flat, begin = unit[start:stop].to(how.dtype), 0
        for name, local, placed in entries:
            shard = unit[begin : begin + prod(local)].view(local)
            placed.fill(shard, full(name))
            low, high = (min(max(edge - begin, 0), prod(local)) for edge in (start, stop))
            at_flat = begin + low - start
            part = flat[at_flat : at_flat + high - low] if low < high else flat[:0]
            results[name] = part, placed.part(local, low, high)
            begin += prod(local)
        flat.copy_(unit[start:stop])
    return results


def blank(tensors: RankTensors) -> RankTensors:
    """The same with other content; each tensor begins in the middle of a longer one."""
    return {
        name: (torch.full((t.numel() + 3,), 77, dtype=t.dtype)[2:-1], place)
        for name, (t, place) in tensors.items()
    }


def differing(got: RankTensors, want: RankTensors) -> list[str]:
    return [name for name, (t, _) in got.items() if not torch.equal(t, want[name][0])]


def cross(root: str, cuts: list[Cut], others: list[str]) -> list[str]:
    """Save under each, and read what there is under some, in turn; what differed."""
    rank, wrong, mine = dist.get_rank(), list[str](), list[str]()
    for at, how in enumerate(cuts):
        tensors = true_state(how, rank)
        mine.append(str(save(f"{root}/{len(cuts)}-{at}", at, tensors, {"at": at})))
    for (at, path), further in itertools.product(enumerate(mine + others), (0, 1, 3)):
        how = cuts[(at + further) % len(cuts)]
        want, got = true_state(how, rank), blank(true_state(how, rank))
        load(path, got, check=False)
        if not path.startswith(f"{root}/{len(FOUR)}-{BFLOAT}/"):
            wrong += [f"{path} as {how}: {name}" for name in differing(got, want)]
        else:  # what was written was rounded
            want = {n: (t.bfloat16().to(t.dtype), p) for n, (t, p) in want.items()}
            wrong += [f"{path} as {how}: {name}" for name in differing(got, want)]
    return wrong


BFLOAT = 6


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shards")
    assert on_ranks(4, cross, str(root), FOUR, []) == [[]] * 4
    return root


def of_four(written: Path) -> list[Path]:
    return [written / f"{len(FOUR)}-{at}" / f"step-{at:08d}" for at in range(len(FOUR))]


def test_any_two_splits_of_four_and_two_ranks_read_each_other(written: Path) -> None:
    others = [str(path) for path in of_four(written)]
    assert on_ranks(2, cross, str(written), TWO, others) == [[]] * 2


def test_one_process_reads_checkpoints_of_four_ranks(written: Path) -> None:
    for at, path in enumerate(of_four(written)):
        want = {n: (full(n), ShardPlacement.unsharded(n, s)) for n, s in (DENSE | EXPERTS).items()}
        if at == BFLOAT:
            want = {n: (t.bfloat16().float(), p) for n, (t, p) in want.items()}
        got = {n: (torch.full_like(t, 77), p) for n, (t, p) in want.items()}
        load(path, got)
        assert differing(got, want) == []


def test_boxes_on_several_ranks_are_written_once(written: Path) -> None:
    total = 4 * sum(prod(shape) for shape in (DENSE | EXPERTS).values())
    for at, path in enumerate(of_four(written)):
        index = tensor_index(path)
        assert {name: saved.shape for name, saved in index.items()} == DENSE | EXPERTS
        assert sum(saved.bytes for saved in index.values()) == (total // 2 if at == BFLOAT else total)
        keys = [key for file in path.glob("shard-*") for key in safe_open(file, "pt").keys()]  # noqa: SIM118
        assert len(keys) == len(set(keys)) == sum(len(saved.pieces) for saved in index.values())
    hybrid = [file.stat().st_size for file in sorted(of_four(written)[3].glob("shard-*"))]
    assert len(hybrid) == 4
    assert max(hybrid) < 2.5 * min(hybrid)


def test_the_hand_made_shards_differ_from_the_default() -> None:
    """Some begin inside a row, some have several pieces, some none."""
    by_rank = [true_state(FOUR[1], rank) for rank in range(4)]
    assert any(len(place.pieces) > 2 for tensors in by_rank for _, place in tensors.values())
    assert any(not place.pieces for tensors in by_rank for _, place in tensors.values())
    assert sum(t.numel() for tensors in by_rank for t, _ in tensors.values()) == sum(
        prod(shape) for shape in (DENSE | EXPERTS).values()
    ) + prod((1, 6))  # the padding of the embedding; the unit's own lies in no tensor


FLAT = TensorBox(offsets=(0, 0), sizes=(2, 3), local=(1,), strides=(4, 1))  # its last element is the eighth


@pytest.mark.parametrize(
    ("piece", "local", "fits"),
    [
        (FLAT, (8,), True),
        (FLAT, (7,), False),
        (TensorBox(offsets=(0, 0), sizes=(2, 3), local=(-1,), strides=(4, 1)), (8,), False),
        (TensorBox(offsets=(0, 0), sizes=(2, 3), local=(1, 0), strides=(4, 1)), (8,), False),
        (TensorBox(offsets=(0, 0), sizes=(2, 3), local=(1,), strides=(4,)), (8,), False),
        (
            TensorBox(offsets=(0, 0), sizes=(2, 3), local=(1,), strides=(2, 1)),
            (8,),
            False,
        ),  # its rows overlap
        (FLAT, (2, 4), False),
        (TensorBox(offsets=(0, 0), sizes=(1, 3), local=(5,), strides=(0, 1)), (8,), True),
        (
            TensorBox(offsets=(3, 0), sizes=(2, 3), local=(1,), strides=(4, 1)),
            (8,),
            False,
        ),  # in the plain tensor
    ],
)
def test_a_piece_must_lie_inside_its_flat_tensor(
    piece: TensorBox, local: tuple[int, ...], fits: bool
) -> None:
    tensors = {"w": (torch.zeros(local), ShardPlacement("w", (4, 4), (piece,)))}
    if fits:
        assert isinstance(shards(tensors)["w"], Shards)
    else:
        which = "full" if piece.offsets[0] else "local"
        with pytest.raises(StrettoError, match=rf"tensor w: piece at .* lies outside the {which} tensor"):
            shards(tensors)


def test_a_flat_tensor_that_is_not_contiguous_is_refused() -> None:
    with pytest.raises(StrettoError, match="lies outside the local"):
        shards({"w": (torch.zeros(16)[::2], ShardPlacement("w", (4, 4), (FLAT,)))})


def test_a_tensor_of_two_types_is_refused() -> None:
    plans = list[SavePlan]()
    for rank, dtype in enumerate((torch.bfloat16, torch.float32)):
        placed = ShardPlacement("w", (4,), (TensorBox(offsets=(2 * rank,), sizes=(2,), local=(0,)),))
        plans.append(SavePlan(Shards(torch.zeros(2, dtype=dtype), placed).__create_write_items__("w", None)))
    message = "tensor w is torch.bfloat16 on one rank, torch.float32 on another"
    with pytest.raises(StrettoError, match=message):
        ShardsSavePlanner().create_global_plan(plans)
