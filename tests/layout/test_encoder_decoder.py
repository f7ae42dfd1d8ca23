"""An encoder and a decoder on one run of ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import StrettoError
from stretto.layout import EncoderDecoder, Layout


def test_decoder_follows_the_encoder() -> None:
    pair = EncoderDecoder(Layout(tp=1, dp=2, pp=1), Layout(tp=2, dp=2, pp=2))
    assert pair.world == 10
    assert pair.decoder.offset == 2
    assert pair.groups("pp") == [[0, 2, 6], [0, 3, 7], [1, 4, 8], [1, 5, 9]]
    assert pair.groups("tp-pp") == [[0, 2, 3, 6, 7], [1, 4, 5, 8, 9]]
    assert pair.groups("dp") == [[0, 1], [2, 4], [3, 5], [6, 8], [7, 9]]
    assert pair.groups("tp") == [[0], [1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert pair.group(7, "pp") == [0, 3, 7]
    assert pair.group(1, "pp") == [1, 4, 8]
    assert pair.group(4, "dp") == [2, 4]


@given(
    st.integers(1, 3), st.integers(0, 2), st.integers(1, 2), st.integers(1, 3),
    st.integers(1, 3), st.integers(1, 3),
    st.sampled_from(["tp-cp-ep-dp-pp", "tp-pp-dp-cp-ep", "dp-tp-cp-pp-ep"]),
)  # fmt: skip
def test_pipelines_keep_replica_and_context(
    tp: int, more: int, cp: int, dp: int, encoder_pp: int, decoder_pp: int, order: str
) -> None:
    pair = EncoderDecoder(
        Layout(tp=tp, cp=cp, dp=dp, pp=encoder_pp, order=order),
        Layout(tp=tp + more, cp=cp, dp=dp, pp=decoder_pp, order=order),
    )
    pipelines = pair.groups("pp")
    assert {rank for group in pipelines for rank in group} == set(range(pair.world))
    assert len(pipelines) == (tp + more) * cp * dp
    for group in pipelines:
        assert len(group) == encoder_pp + decoder_pp
        first = [pair.encoder.coordinates(rank) for rank in group[:encoder_pp]]
        second = [pair.decoder.coordinates(rank) for rank in group[encoder_pp:]]
        assert len({(at["dp"], at["cp"]) for at in first + second}) == 1
        assert {at["tp"] for at in first} == {second[0]["tp"] % tp}
        assert [at["pp"] for at in first] == list(range(encoder_pp))
        assert [at["pp"] for at in second] == list(range(decoder_pp))
        assert all(pair.group(rank, "pp") == group for rank in group[encoder_pp:])


@pytest.mark.parametrize(
    ("encoder", "decoder", "says"),
    [
        (Layout(dp=2), Layout(dp=4), "dp=2"),
        (Layout(cp=2), Layout(), "cp=2"),
        (Layout(tp=4), Layout(tp=2), "tp=4"),
    ],
)
def test_pairs_that_do_not_fit_are_refused(encoder: Layout, decoder: Layout, says: str) -> None:
    with pytest.raises(StrettoError, match=says):
        EncoderDecoder(encoder, decoder)
