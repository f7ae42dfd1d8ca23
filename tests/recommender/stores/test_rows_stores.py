"""Stores outside the device beside one in its memory: any sequence of batches leaves the same rows."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stretto.errors import StrettoError
from stretto.recommender.placement import Place
from stretto.recommender.stores import backing, cached
from stretto.recommender.stores.backing import HostRows
from stretto.recommender.stores.cached import CachedStore, Slots, build_store
from stretto.recommender.stores.store import DeviceStore, FetchedRows, RowStore, StateSpec

STATES = {
    "sum": StateSpec(True, torch.float32),
    "moment": StateSpec(False, torch.float64),
    "low": StateSpec(False, torch.int16),
    "updates": StateSpec(True, torch.int64),
}
AWAY: tuple[Place, ...] = ("cpu", "disk")
Stores = tuple[RowStore, RowStore]
Fetched = tuple[FetchedRows, FetchedRows]


def _build(place: Place, rows: int, width: int, folder: str | Path | None, cache: float = 0.1) -> RowStore:
    return build_store(
        place=place,
        rows=rows,
        width=width,
        dtype=torch.float32,
        states=STATES,
        device="cpu",
        cache=cache,
        folder=folder,
    )


@contextmanager
def _store(place: Place, rows: int, width: int = 3, cache: float = 0.1) -> Generator[CachedStore]:
    with TemporaryDirectory() as folder:
        store = _build(place, rows, width, folder, cache)
        assert isinstance(store, CachedStore)
        yield store
        store.close()
        assert not list(Path(folder).iterdir())


def _update(store: RowStore, fetched: FetchedRows, rows: Tensor, step: int) -> Tensor:
    """Change rows in all that a store has of them, once each; returns what was looked up."""
    slots = fetched.slots()
    looked = store.weight[slots]
    each, where = torch.unique(rows, return_inverse=True)
    ordered = torch.empty_like(each)
    ordered[where] = slots
    store.weight[ordered] += (each + step).float()[:, None]
    store.states["sum"][ordered] += step
    store.states["moment"][ordered] = store.states["moment"][ordered] / 2 + store.weight[ordered]
    store.states["low"][ordered] += step % 7
    store.states["updates"][ordered] += 1
    return looked


def _update_both(stores: Stores, fetched: Fetched, rows: Tensor, step: int) -> None:
    """Update rows of two stores and release them; both must look up the same values."""
    values = [_update(store, batch, rows, step) for store, batch in zip(stores, fetched, strict=True)]
    assert torch.equal(*values)
    for store, batch in zip(stores, fetched, strict=True):
        store.release(batch)


def _fetch_both(stores: Stores, rows: Tensor) -> Fetched:
    return stores[0].fetch(rows), stores[1].fetch(rows)


def _same(stores: Stores) -> None:
    device, cached = (store.read(0, store.rows) for store in stores)
    assert device.keys() == cached.keys()
    for name, value in device.items():
        assert torch.equal(value, cached[name]), name


@given(st.data())
def test_any_sequence_is_as_in_memory(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 40))
    cache = data.draw(st.sampled_from([0.01, 0.2, 1.0]))
    batches = data.draw(st.lists(st.lists(st.integers(0, rows - 1), max_size=25), min_size=1, max_size=12))
    with _store(data.draw(st.sampled_from(AWAY)), rows, cache=cache) as away, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stores = DeviceStore(rows, 3, torch.float32, STATES), away
        initial = {"weight": torch.randn(rows, 3), "sum": torch.rand(rows)}
        for store in stores:
            store.write(0, initial)
        prefetched = None
        for step, ids in enumerate(batches):
            batch = torch.tensor(ids, dtype=torch.int64)
            fetched = prefetched or _fetch_both(stores, batch)
            prefetched = None
            if step + 1 < len(batches) and data.draw(st.booleans()):
                prefetched = _fetch_both(stores, torch.tensor(batches[step + 1], dtype=torch.int64))
                if data.draw(st.booleans()):
                    prefetched[1].slots()
            _update_both(stores, fetched, batch, step)
            if prefetched is None and data.draw(st.booleans()):
                first = data.draw(st.integers(0, rows))
                for store in stores:
                    store.write(first, {"moment": torch.ones(rows - first, 3, dtype=torch.float64) * step})
                _same(stores)
        _same(stores)


@pytest.mark.parametrize("place", AWAY)
@pytest.mark.parametrize("compiled", [True, False])
def test_heavy_eviction_with_two_batches_in_flight(place: Place, compiled: bool) -> None:
    rows, generator = 2000, torch.Generator().manual_seed(1)
    copy = backing.copy_rows() if compiled else backing.copy_in_numpy
    with (
        mock.patch("stretto.recommender.stores.backing.copy_rows", return_value=copy),
        _store(place, rows, 5) as away,
    ):
        stores = DeviceStore(rows, 5, torch.float32, STATES), away
        batches = [torch.randint(0, rows, (90,), generator=generator) for _ in range(60)]
        prefetched = _fetch_both(stores, batches[0])
        for step, batch in enumerate(batches):
            fetched = prefetched
            prefetched = _fetch_both(stores, batches[(step + 1) % len(batches)])
            _update_both(stores, fetched, batch, step)
        away.release(prefetched[1])
        assert away.slots == 200  # two batches fit: it did not grow
        assert away.hits < 0.3
        _same(stores)


def test_a_cache_too_small_grows_and_says_so_once() -> None:
    with _store("cpu", 100, cache=0.02) as store:
        assert store.slots == 2
        weight = store.weight
        store.write(0, {"weight": torch.arange(100.0)[:, None].expand(100, 3)})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for first in (0, 30, 60):
                first_rows, two = (
                    store.fetch(torch.arange(first, first + 20)),
                    store.fetch(torch.arange(80, 100)),
                )
                assert store.weight[first_rows.slots()][:, 0].tolist() == list(range(first, first + 20))
                assert store.weight[two.slots()][:, 0].tolist() == list(range(80, 100))
                store.release(two)
                store.release(first_rows)
        assert [str(warning.message)[:39] for warning in caught] == [
            "a cache of 2 of 100 rows is too small f"
        ]
        assert store.slots == 40
        assert store.weight is weight  # who keeps the tensor, keeps the right one
        assert store.states["low"].shape == (40, 3)


def test_rows_of_a_batch_in_flight_stay_where_they_are() -> None:
    with _store("cpu", 50, cache=0.4) as store:
        first = torch.arange(10)
        fetched = store.fetch(first)
        store.weight[fetched.slots()] = 7.0
        for start in (10, 20, 30, 40):
            store.release(store.fetch(torch.arange(start, start + 10)))
        assert store.weight[fetched.slots()].eq(7).all()
        store.release(fetched)
        assert store.read(0, 10, ("weight",))["weight"].eq(7).all()


def test_popular_rows_stay() -> None:
    """Of ids whose popularity is 1 / rank, a tenth of the rows serves nearly as many lookups as the tenth
    that is truly the most popular; by age alone it would be 0.09 less.
    """
    rows, generator = 5000, torch.Generator().manual_seed(2)
    popularity = 1.0 / torch.arange(1.0, rows + 1)
    best = float(popularity[:500].sum() / popularity.sum())
    names = torch.randperm(rows, generator=generator)
    slots = Slots(rows, 500)
    for step in range(300):
        if step == 150:
            slots.requested = slots.fetched = 0
        batch = names[popularity.multinomial(200, True, generator=generator)].numpy()
        slots.assign(batch, *slots.begin_batch(batch)[:2])
        slots.release(slots.batch)
    assert best - 0.03 < 1 - slots.fetched / slots.requested < best + 0.05


def test_batches_that_pass_one_that_waits_do_not_fill_the_cache() -> None:
    """As an evaluation does while the next step's rows are there already."""
    with _store("cpu", 100, cache=0.4) as store:
        waiting = store.fetch(torch.arange(20))
        for step in range(50):
            store.release(store.fetch(torch.arange(20 + step, 40 + step)))
        assert store.slots == 40
        store.release(waiting)


def test_what_goes_wrong_behind_surfaces() -> None:
    class Broken(HostRows):
        def get(self, rows: Tensor, into: Mapping[str, Tensor], to: Tensor) -> None:
            raise OSError("the disk is gone")

    store = CachedStore(Broken(10, 2, torch.float32, {}), "cpu", 0.5)
    fetched = store.fetch(torch.tensor([1]))
    for look in (fetched.slots, store.fetch(torch.tensor([2])).slots, lambda: store.read(0, 10)):
        with pytest.raises(OSError, match="the disk is gone"):
            look()
    store.close()


def test_slots_waits_for_rows_that_another_batch_brings() -> None:
    gate = threading.Event()

    class Slow(HostRows):
        def get(self, rows: Tensor, into: Mapping[str, Tensor], to: Tensor) -> None:
            gate.wait(10)
            super().get(rows, into, to)

    store = CachedStore(Slow(10, 2, torch.float32, {}), "cpu", 0.5)
    store.write(0, {"weight": torch.ones(10, 2)})
    rows = torch.tensor([1, 3])
    first, second = store.fetch(rows), store.fetch(rows)
    threading.Timer(0.05, gate.set).start()
    assert store.weight[second.slots()].eq(1).all()
    store.release(first)
    store.release(second)
    store.close()


def test_the_way_of_another_device_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows go through buffers to a device whose memory is not the host's, in chunks."""
    monkeypatch.setattr(cached, "_CHUNK", 200)
    rows, generator = 300, torch.Generator().manual_seed(3)
    with _store("cpu", rows) as away:
        monkeypatch.setattr(away, "_on_host", False)
        stores = DeviceStore(rows, 3, torch.float32, STATES), away
        for step in range(30):
            batch = torch.randint(0, rows, (25,), generator=generator)
            _update_both(stores, _fetch_both(stores, batch), batch, step)
        _same(stores)


def test_pages_go_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backing, "_MAX_RESIDENT", 5000)
    monkeypatch.setattr(backing, "_CHUNK", 7)
    with _store("disk", 500, 30) as store:
        values = torch.randn(500, 30)
        for start in range(0, 500, 50):
            store.write(start, {"weight": values[start : start + 50]})
        for start in range(0, 500, 50):
            fetched = store.fetch(torch.arange(start, start + 50))
            store.weight[fetched.slots()] += 1
            store.release(fetched)
        assert torch.equal(store.read(0, 500)["weight"], values + 1)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not say what is resident")
def test_little_of_a_large_file_is_resident(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backing, "_MAX_RESIDENT", 1 << 22)
    monkeypatch.setattr(backing, "_CHUNK", 64)
    rows, values, most = 1 << 17, torch.randn(1 << 12, 64), list[int]()
    before = backing._resident()  # pyright: ignore[reportPrivateUsage]
    with _store("disk", rows, 64, 0.01) as store:
        for start in range(0, rows, len(values)):  # 137 MiB of file in all
            store.write(start, {"weight": values})
            most.append(backing._resident())  # pyright: ignore[reportPrivateUsage]
        for step in range(10):
            store.release(store.fetch((torch.arange(500) * 9973 + step * 7) % rows))
            store.read(step * 8192, (step + 1) * 8192)
            most.append(backing._resident())  # pyright: ignore[reportPrivateUsage]
        assert max(most) - before < 40 << 20


def test_no_room_and_no_folder_are_said(tmp_path: Path) -> None:
    with pytest.raises(StrettoError, match=r"tables.folder: not enough space for table rows in .*MiB"):
        _build("disk", 1 << 46, 64, tmp_path / "here", cache=1e-12)
    assert not list((tmp_path / "here").iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(StrettoError, match=r"tables.folder is .*file"):
        _build("disk", 10, 4, tmp_path / "file")
    with pytest.raises(StrettoError, match="need a folder"):
        _build("disk", 10, 4, None)


def test_states_of_all_widths_lie_in_one_record() -> None:
    home = HostRows(
        4, 3, torch.bfloat16, {"low": StateSpec(False, torch.int16), "n": StateSpec(True, torch.int64)}
    )
    assert home.record == 24
    values = {"weight": torch.randn(4, 3).bfloat16(), "low": torch.arange(12).view(4, 3).short()}
    home.write(0, values)
    for name, value in home.read(1, 4, ("weight", "low", "n")).items():
        assert torch.equal(
            value, values.get(name, torch.zeros(4, 3))[1:] if name != "n" else torch.zeros(3).long()
        )
