"""Schedules by name, and the errors for unknown names and options."""

from __future__ import annotations

import subprocess
import sys

import pytest

from stretto.errors import StrettoError
from stretto.program import names, options, schedule


def test_every_schedule_has_a_line_and_builds():
    assert set(names()) >= {"naive", "gpipe", "1f1b", "interleaved"}
    for name, about in names().items():
        assert about
        assert "\n" not in about
        program = schedule(name, 2, 4)
        assert (program.name, program.ranks, program.microbatches) == (name, 2, 4)
        assert not program.lowered
    assert options("interleaved") == {"chunks": 2, "group": None}
    assert options("1f1b") == {}


def test_one_chunk_fits_every_schedule_that_can_have_one():
    for name in names():
        if "chunks" in options(name) or schedule(name, 2, 3).depth == 2:
            assert schedule(name, 2, 3, chunks=1).depth == 2
        else:
            with pytest.raises(StrettoError, match=f"chunks is 1, but schedule '{name}' has . stages a rank"):
                schedule(name, 2, 3, chunks=1)


def test_every_schedule_of_the_field_is_there():
    assert set(names()) == {
        *("naive", "gpipe", "bfs", "1f1b", "1f1b-eager", "interleaved", "pipedream", "pipedream-2bw"),
        *("zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "interleaved-zb", "hanayo"),
        *("dualpipe-v", "dualpipe", "chimera", "auto", "forward-only"),
    }


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("1f1", 2, 2), ["'1f1'", "1f1b", "did you mean"]),
        (("zzz", 2, 2), ["'zzz'", "gpipe, bfs, forward-only, 1f1b"]),
        (("gpipe", 0, 2), ["ranks is 0", "ranks=1"]),
        (("gpipe", 2, -1), ["microbatches is -1", "microbatches=1"]),
        (("gpipe", 2, 2.0), ["microbatches is 2.0"]),
        (("gpipe", True, 2), ["ranks is True"]),
        (("1f1b", 2, 2, 2), ["chunks is 2", "'1f1b'", "interleaved"]),
        (("1f1b", 2, 2, None, 2), ["group is 2", "'1f1b'", "interleaved"]),
        (("interleaved", 2, 2, 0), ["chunks is 0", "chunks=1"]),
        (("interleaved", 4, 8, 2, 3), ["group is 3", "4 to 8", "group=4"]),
        (("interleaved", 4, 8, 2, 9), ["group is 9", "4 to 8", "group=8"]),
        (("interleaved", 4, 2, 2, 1), ["group is 1", "2 to 4", "group=2"]),
    ],
)
def test_bad_requests_name_the_field_and_the_nearest_that_is_legal(
    arguments: tuple[object, ...], says: list[str]
):
    with pytest.raises(StrettoError) as caught:
        schedule(*arguments)  # type: ignore[arg-type]
    for phrase in says:
        assert phrase in str(caught.value)


def test_no_torch_or_numpy_is_imported():
    code = (
        "import sys, stretto.program.text, stretto.program.replay\n"
        "print([name for name in ('torch', 'numpy', 'pydantic') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
