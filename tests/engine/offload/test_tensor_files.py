"""Groups of tensors in files, and looking at one of them without bringing the others' objects back."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stretto.engine.offload.tensor_files import TensorFiles, at_hand, is_away
from stretto.errors import StrettoError

Groups = dict[int, list[Tensor]]


@pytest.fixture
def files(tmp_path: Path) -> Iterator[TensorFiles]:
    tensor_files = TensorFiles(tmp_path, 1, "states of unit")
    yield tensor_files
    tensor_files.close()


def added(files: TensorFiles, groups: int = 5) -> tuple[Groups, Groups]:
    """The tensors, and what they are."""
    torch.manual_seed(0)
    tensors = {key: [torch.randn(3, 4 + key), torch.randn(900)] for key in range(groups)}
    want = {key: [t.clone() for t in group] for key, group in tensors.items()}
    for key, group in tensors.items():
        files.add(key, group)
    return tensors, want


def test_groups_are_fetched_and_put_back(files: TensorFiles):
    tensors, want = added(files)
    for turn in range(3):
        for key, group in tensors.items():
            files.fetch(key)
            files.start_fetch((key + 1) % 5)
            assert all(torch.equal(a, b) for a, b in zip(group, want[key], strict=True))
            assert not is_away(group[0])
            if turn % 2:
                files.release(key)
                continue
            group[1] += 1
            want[key][1] += 1
            files.put(key)
            assert is_away(group[0])


def test_offloaded_tensors_are_read_through_at_hand(files: TensorFiles):
    tensors, want = added(files)
    views = {key: group[1].detach() for key, group in tensors.items()}
    for key in (3, 1, 4, 0, 2):
        assert torch.equal(at_hand(views[key]), want[key][1])
        assert torch.equal(at_hand(tensors[key][0]), want[key][0])
        assert is_away(tensors[key][0])  # the tensor itself stays away, however it is read
    at_hand(views[2], change=True).zero_()
    at_hand(tensors[2][0], change=True)[1] = 7.0
    for key in (0, 1, 3, 4):
        at_hand(views[key])
    files.fetch(2)
    assert not tensors[2][1].any()
    assert bool((tensors[2][0][1] == 7).all())
    assert torch.equal(tensors[2][0][0], want[2][0][0])
    files.put(2)
    here = torch.ones(3)
    assert at_hand(here) is here


def test_a_change_through_the_last_view_is_written_before_an_update(files: TensorFiles):
    tensors, _ = added(files)
    for call in (files.fetch, files.start_fetch):
        at_hand(tensors[1][1], change=True).fill_(5.0)
        call(1)
        if call == files.start_fetch:
            files.fetch(1)
        assert bool((tensors[1][1] == 5).all())
        files.put(1)


def test_a_part_of_an_offloaded_tensor_is_refused(files: TensorFiles):
    tensors, _ = added(files)
    with pytest.raises(
        StrettoError, match=r"a part of shape \[2, 4\] of a tensor of shape \[3, 4\] is in a file"
    ):
        at_hand(tensors[0][0][1:])


def test_closing_removes_the_files_and_forgets_their_tensors(tmp_path: Path):
    files = TensorFiles(tmp_path)
    tensors, _ = added(files, 40)
    files.close()
    assert not os.listdir(tmp_path)
    del tensors, files
    gc.collect()
    assert not any(is_away(torch.empty(())) for _ in range(200))
