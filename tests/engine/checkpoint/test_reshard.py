"""Saved under one layout, read under another, on real ranks: bitwise the same, padding zero."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

from hand_layouts import Hand, blank_state, differing, full, shapes, true_state
from ranks import on_ranks
from stretto.engine.checkpoint.load import latest, load, tensor_index, verify
from stretto.engine.checkpoint.manifest import read_manifest
from stretto.engine.checkpoint.save import save
from stretto.engine.parallel.fragment import ShardPlacement
from torture import counts

FOUR = [
    Hand(tp=2, pp=2),
    Hand(dp=4),
    Hand(tp=4),
    Hand(dp=2, pp=2),
    Hand(tp=2, dp=2),
    Hand(dp=4, zero=True),
    Hand(tp=2, dp=2, zero=True),
]
TWO = [Hand(tp=2), Hand(dp=2, zero=True), Hand(pp=2)]
TWELVE = {
    1: [Hand()],
    2: [Hand(dp=2), *TWO],
    4: [hand for hand in FOUR if hand != Hand(tp=2, dp=2, zero=True) and hand != Hand(dp=2, pp=2)]
    + [Hand(pp=4), Hand(dp=2, pp=2, zero=True)],
}
META = {"step": 3, "seed": 1, "layout": {"tp": 2}, "note": "é", "lr": 0.1 + 0.2, "none": None}


def save_and_cross(root: str, hands: list[Hand], others: list[str]) -> list[str]:
    """Save under each layout, then read every checkpoint there is under every second; what differed."""
    rank, wrong = dist.get_rank(), list[str]()
    for i, hand in enumerate(hands):
        local = {"random": torch.tensor([rank, i, 7], dtype=torch.uint8)}
        state = true_state(hand, rank)
        path = save(f"{root}/{len(hands)}-{i}", i, state, META, local)
        wrong += [f"save changed {n}" for n in differing(state, hand, rank)]
        assert path.name == f"step-{i:08d}"
    mine = [f"{root}/{len(hands)}-{i}/step-{i:08d}" for i in range(len(hands))]
    for at, path in enumerate(mine + others):
        for hand in hands[at % 2 :: 2]:
            state = blank_state(hand, rank)
            loaded = load(path, state)
            wrong += [f"{path} as {hand}: {n}" for n in differing(state, hand, rank)]
            assert loaded.meta == META
            local = loaded.per_rank.get("random", torch.empty(0)).tolist()
            assert local == ([rank, loaded.step, 7] if path in mine else []), local
    return wrong


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of four ranks, having been read by each other's layouts."""
    root = tmp_path_factory.mktemp("written")
    assert on_ranks(4, save_and_cross, str(root), FOUR, []) == [[]] * 4
    return root


def of_four(written: Path) -> list[Path]:
    return [written / f"{len(FOUR)}-{i}" / f"step-{i:08d}" for i in range(len(FOUR))]


def test_four_ranks_read_each_others_layouts(written: Path) -> None:
    assert all(verify(path) == [] for path in of_four(written))


def test_two_ranks_read_what_four_wrote_and_write_their_own(written: Path) -> None:
    others = [str(path) for path in of_four(written)]
    assert on_ranks(2, save_and_cross, str(written), TWO, others) == [[]] * 2
    for i in range(len(TWO)):
        state = blank_state(Hand(), 0)
        load(written / f"{len(TWO)}-{i}" / f"step-{i:08d}", state)
        assert differing(state, Hand(), 0) == []


@pytest.mark.parametrize("i", range(len(FOUR)), ids=[str(hand) for hand in FOUR])
def test_one_process_without_a_group_reads_any(written: Path, i: int) -> None:
    path = latest(of_four(written)[i].parent)
    assert path == of_four(written)[i]
    state = blank_state(Hand(), 0)
    loaded = load(path, state)
    assert differing(state, Hand(), 0) == []
    assert (loaded.step, loaded.meta, loaded.per_rank) == (i, META, {})
    assert {n: s.shape for n, s in tensor_index(path).items()} == shapes()
    assert read_manifest(path).world == 4


def test_replicas_share_the_writing_and_nothing_is_written_twice(written: Path) -> None:
    path = of_four(written)[1]
    sizes = [file.stat().st_size for file in sorted(path.glob("shard-*"))]
    assert len(sizes) == 4
    assert max(sizes) < 2.5 * min(sizes)
    keys = [key for file in path.glob("shard-*") for key in safe_open(file, "pt").keys()]  # noqa: SIM118
    assert len(keys) == len(set(keys)) == len(shapes()) + 2 * 4 + 4  # q, k, v apart; 4 random states


def test_only_owners_write(written: Path) -> None:
    for file in of_four(written)[2].glob("shard-*"):
        norms = [key for key in safe_open(file, "pt").keys() if key.endswith("norm")]  # noqa: SIM118
        assert len(norms) == (4 if file.name == "shard-00000.safetensors" else 0)


def test_shard_files_are_plain_safetensors(written: Path) -> None:
    results = {}
    for file in of_four(written)[2].glob("shard-*"):
        with safe_open(file, "pt") as opened:
            results |= {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    assert torch.equal(results["model.blocks.0.norm"], full("model.blocks.0.norm"))
    assert torch.equal(results["model.blocks.0.up[2:4,0:6]"], full("model.blocks.0.up")[2:4])


def test_only_the_model_of_a_checkpoint_is_read(written: Path) -> None:
    names = [n for n in shapes() if n.startswith("model.")]
    model = {n: (torch.empty_like(full(n)), ShardPlacement.unsharded(n, shapes()[n])) for n in names}
    load(of_four(written)[0], model, ignore=["optim."])
    assert all(torch.equal(model[n][0], full(n)) for n in names)


def test_floats_convert(written: Path) -> None:
    state = {
        n: (t.double() if t.is_floating_point() else t, p) for n, (t, p) in blank_state(Hand(), 0).items()
    }
    load(of_four(written)[0], state)
    assert torch.equal(state["model.embed"][0][:13], full("model.embed").double())
    assert torch.equal(state["model.blocks.1.norm"][0], full("model.blocks.1.norm").double())


@pytest.mark.slow
def test_every_ordered_pair_of_twelve_layouts(tmp_path: Path) -> None:
    root, pairs = str(tmp_path), sum(map(len, TWELVE.values())) ** 2
    assert pairs == 144
    for world, hands in TWELVE.items():
        assert on_ranks(world, save_and_cross, root, hands, []) == [[]] * world
    paths = [f"{root}/{len(of)}-{i}/step-{i:08d}" for of in TWELVE.values() for i in range(len(of))]
    for world, hands in TWELVE.items():
        mine = [path for path in paths if path.startswith(f"{root}/{len(hands)}-")]
        others = [path for path in paths if path not in mine]
        assert on_ranks(world, cross, hands, others) == [[]] * world
    counts.record(
        "ordered pairs of 12 layouts: written by one, read by the other",
        tried=pairs,
        passed=pairs,
        command="pytest -m slow tests/engine/checkpoint/test_reshard.py",
        note="weights, states and padding bitwise",
    )


def cross(hands: list[Hand], paths: list[str]) -> list[str]:
    """Read every checkpoint under each layout; what differed."""
    rank, wrong = dist.get_rank(), list[str]()
    for path in paths:
        for hand in hands:
            state = blank_state(hand, rank)
            load(path, state)
            wrong += [f"{path} as {hand}: {n}" for n in differing(state, hand, rank)]
    return wrong
