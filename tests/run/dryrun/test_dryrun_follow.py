"""Memory of tensors without values: freed memory stays freed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from stretto.run.dryrun.fake import Following, without_values

LOOKS: dict[str, Callable[[nn.Parameter, Tensor], object]] = {
    "data": lambda parameter, _: parameter.data,
    "detach": lambda parameter, _: parameter.detach(),
    "view": lambda _, flat: flat.view(2, 6),
    "slice": lambda _, flat: flat[3:5],
}


@pytest.mark.parametrize("look", LOOKS)
def test_looking_at_weights_that_are_not_gathered_makes_no_room(look: str) -> None:
    following = Following()
    with without_values(), following:
        flat = torch.zeros(12)
        parameter = nn.Parameter(flat[:8].view(2, 4))
        following.watch([flat])
        following.look()
        full = following.allocated
        flat.untyped_storage().resize_(0)
        following.look()
        following.restart()
        for _ in range(2):  # the second may come from a cache
            LOOKS[look](parameter, flat)
        assert full == 48
        assert (flat.untyped_storage().nbytes(), following.allocated, following.peak) == (0, 0, 0)
        flat.untyped_storage().resize_(48)  # gathered
        flat.add_(1.0)
        assert (following.allocated, following.peak >= 48) == (48, True)
