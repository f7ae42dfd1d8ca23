from __future__ import annotations

import pytest

from stretto.cost.presets import PRESETS, preset
from stretto.errors import StrettoError


def test_every_preset_is_a_valid_shape():
    assert len(set(PRESETS)) == len(PRESETS)
    for name in PRESETS:
        assert preset(name).layers > 0


def test_case_does_not_matter():
    assert preset("Llama3-8B") == preset("llama3-8b")


def test_unknown_name_gets_the_nearest():
    with pytest.raises(StrettoError, match="'llama3-8'") as caught:
        preset("llama3-8")
    assert "llama3-8b" in (caught.value.hint or "")


def test_unlike_anything_lists_all():
    with pytest.raises(StrettoError) as caught:
        preset("???")
    assert "gpt2-xl" in (caught.value.hint or "")
