"""Cuts against the replays of all possible cuts, and their bounds."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import StrettoError
from stretto.planner.cutting.partition import partition
from stretto.planner.cutting.profile import (
    LayerProfile,
    ModelProfile,
    SharedWeights,
    profile_json,
    read_profile,
)
from stretto.planner.cutting.rows import Cut, StageSums
from stretto.program import schedule
from stretto.program.program import Program
from stretto.program.replay import Costs, simulate
from stretto.program.transforms.activations import recompute

HOP, BANDWIDTH, STATES = 0.25, 8.0, 3.0
CASES = [
    ("1f1b", 3, 4, {}),
    ("gpipe", 3, 3, {}),
    ("zb-h1", 3, 4, {}),
    ("interleaved", 2, 4, {"chunks": 2}),
    ("zb-v", 2, 3, {}),
    ("v-half", 2, 4, {}),
    ("chimera", 2, 2, {}),
    ("pipedream", 3, 4, {}),
]


def every_cut(layers: int, stages: int) -> Iterator[Cut]:
    for inner in combinations(range(1, layers), stages - 1):
        yield (0, *inner, layers)


def replayed(profile: ModelProfile, program: Program, cut: Cut) -> float:
    """The makespan, by the general replay."""
    layers = profile.layers
    stages = [layers[i:j] for i, j in pairwise(cut)]
    costs = Costs(
        per_stage=[
            (sum(l.forward for l in s), sum(l.halves[0] for l in s), sum(l.halves[1] for l in s))
            for s in stages
        ],
        hop=HOP,
        message_bytes=[s[-1].output for s in stages[:-1]],
        bandwidth=BANDWIDTH,
    )
    return simulate(program, costs).makespan


def rank_bytes(profile: ModelProfile, program: Program, cut: Cut) -> list[float]:
    """Bytes of each rank, action by action."""
    layers, depth = profile.layers, program.depth
    ranks = []
    for rank in range(program.ranks):
        stages = [(s % depth, range(cut[s % depth], cut[s % depth + 1])) for s in program.stages_of(rank)]
        here = [at for _, stage in stages for at in stage]
        # an older version is a copy more of the weights
        states = sum(
            (STATES + versions - 1) * layers[at].parameters
            for (_, stage), versions in zip(stages, _versions(program, rank), strict=True)
            for at in stage
        )
        for weights in profile.shared:
            states -= STATES * weights.bytes * max(0, sum(at in here for at in weights.layers) - 1)
        keeps = {
            s: sum(layers[at].activations for at in stage)
            + (max(0, layers[stage.start - 1].output - layers[stage.start].input) if stage.start else 0)
            for s, stage in stages
        }
        now = most = 0.0
        for stage, kind, _ in program.orders[rank]:
            now += {"F": 1, "B": -1, "W": -1}.get(kind, 0) * keeps[stage % depth]
            most = max(most, now)
        ranks.append(states + most)
    return ranks


def _versions(program: Program, rank: int) -> list[int]:
    from stretto.program.checks.versions import weight_versions

    return [weight_versions(program)[s] for s in program.stages_of(rank)]


small_numbers = st.integers(0, 9)
layers_ = st.lists(
    st.builds(
        lambda f, b, w, p, a, o, i: LayerProfile(
            name="layer",
            forward=f,
            backward=b + w,
            parameters=p,
            activations=a + i,
            output=o,
            weight=w,
            input=i,
        ),
        *[small_numbers] * 7,
    ),
    min_size=4,
    max_size=8,
)


@pytest.mark.parametrize(("name", "ranks", "microbatches", "options"), CASES, ids=[c[0] for c in CASES])
@settings(max_examples=12, deadline=None)
@given(layers=layers_, memory=st.none() | st.integers(40, 400), tied=st.booleans())
def test_the_cut_equals_brute_force(
    name: str,
    ranks: int,
    microbatches: int,
    options: dict[str, int],
    layers: list[LayerProfile],
    memory: int | None,
    tied: bool,
) -> None:
    program = schedule(name, ranks, microbatches, **options)
    both = min(layers[0].parameters, layers[-1].parameters)
    shared = (SharedWeights((0, len(layers) - 1), both),) if tied and not program.versions else ()
    profile = ModelProfile(tuple(layers), shared)
    fitting = {
        cut: replayed(profile, program, cut)
        for cut in every_cut(len(layers), program.depth)
        if memory is None or max(rank_bytes(profile, program, cut)) <= memory
    }
    options = {"states": STATES, "hop": HOP, "bandwidth": BANDWIDTH}
    if not fitting:
        least = min(max(rank_bytes(profile, program, cut)) for cut in every_cut(len(layers), program.depth))
        with pytest.raises(StrettoError, match="every cut needs") as raised:
            partition(profile, program, memory=memory, **options)
        assert f"{least / 2**30:.4g} GiB or more" in raised.value.message
        fullest = max(partition(profile, program, memory=memory, must_fit=False, **options).memory)
        assert fullest == pytest.approx(least)
        return
    best = partition(profile, program, memory=memory, **options)
    cut = (*(stage.start for stage in best.stages), len(layers))
    assert best.seconds == pytest.approx(min(fitting.values()))
    assert fitting[cut] == pytest.approx(best.seconds)
    assert best.proved
    assert best.memory == pytest.approx(rank_bytes(profile, program, cut))
    assert best.timeline.makespan == pytest.approx(best.seconds)
    assert min(best.start_seconds.values()) >= best.seconds * (1 - 1e-9)


@pytest.mark.parametrize(("name", "ranks", "microbatches", "options"), CASES, ids=[c[0] for c in CASES])
@settings(max_examples=10, deadline=None)
@given(layers=layers_, data=st.data())
def test_no_cut_is_faster_than_a_chain_of_another(
    name: str,
    ranks: int,
    microbatches: int,
    options: dict[str, int],
    layers: list[LayerProfile],
    data: st.DataObject,
) -> None:
    """A row equals the makespan of the cut that it comes from, and bounds every other."""
    program = schedule(name, ranks, microbatches, **options)
    table = StageSums(ModelProfile(tuple(layers)), program, STATES, HOP, BANDWIDTH)
    cuts = list(every_cut(len(layers), program.depth))
    cut, other = data.draw(st.sampled_from(cuts)), data.draw(st.sampled_from(cuts))
    seconds, counts = table.replay(cut)
    row = table.chain(counts)
    assert row.of(cut) == pytest.approx(seconds)
    least = min(row.of(cut) for cut in cuts)
    assert row.suffix[0][0] == pytest.approx(least)
    there = table.replay(other)[0] * (1 + 1e-9)
    assert all(each.of(other) <= there for each in (row, *table.work()))
    limits = table.memory(other)
    for rank in range(program.ranks):
        assert max(each.of(other) for each in table.memory_rows(rank)) <= limits[rank] * (1 + 1e-9)


def uneven(n: int, wide: tuple[int, ...]) -> ModelProfile:
    """Layers of which some take 16 times as long."""
    each = [(16.0 if at in wide else 1.0) for at in range(n)]
    return ModelProfile(
        tuple(
            LayerProfile(name=f"l{at}", forward=t, backward=2 * t, parameters=4, activations=4, output=4)
            for at, t in enumerate(each)
        )
    )


def test_wide_layers_at_the_end_move_the_others_to_the_first_stage() -> None:
    best = partition(uneven(10, (8, 9)), schedule("1f1b", 2, 8))
    assert best.stages == (range(9), range(9, 10))
    assert best.start_seconds["layers"] > 1.3 * best.seconds
    assert best.bound == best.seconds


def test_a_rank_with_several_stages_counts_them_together() -> None:
    """In a vee rank 0 has the first and the last stage; the heavy layers must not both be there."""
    best = partition(uneven(12, (0, 11)), schedule("zb-v", 2, 16))
    busy = [
        sum(3 * (16 if at in (0, 11) else 1) for s in (r, 3 - r) for at in best.stages[s]) for r in range(2)
    ]
    assert sum(busy) == 3 * (2 * 16 + 10)
    assert best.stages[0].stop == 1  # nothing more than it must have
    assert best.stages[3].start == 11
    loop = partition(uneven(12, (0, 11)), schedule("interleaved", 2, 16, chunks=2))
    assert loop.seconds < 0.8 * best.seconds  # there the two are on two ranks


def test_memory_moves_layers_off_the_first_rank() -> None:
    """1F1B holds most microbatches on rank 0."""
    layers = tuple(
        LayerProfile(name=f"l{at}", forward=1.0, backward=2.0, parameters=0, activations=10)
        for at in range(8)
    )
    program = schedule("1f1b", 4, 8)
    assert [len(s) for s in partition(ModelProfile(layers), program).stages] == [2, 2, 2, 2]
    tight = partition(ModelProfile(layers), program, memory=60.0)
    assert len(tight.stages[0]) == 1  # 4 microbatches of 10 bytes, not 8
    assert max(tight.memory) <= 60
    assert tight.start_seconds["layers"] == inf
    assert tight.proved


def test_recomputed_microbatches_hold_their_input_only() -> None:
    layers = tuple(
        LayerProfile(name=f"l{at}", forward=1.0, backward=2.0, parameters=0, activations=10, output=1)
        for at in range(4)
    )
    profile = ModelProfile(layers)
    program = recompute(schedule("1f1b", 2, 4))
    table = StageSums(profile, program, 0.0)
    # rank 1: one microbatch; rank 0 has the sample itself, which costs nothing, and one that is made again
    assert table.memory((0, 2, 4)) == [20, 21]
    plain = StageSums(profile, schedule("1f1b", 2, 4), 0.0)
    assert plain.memory((0, 2, 4)) == [40, 21]
    assert table.replay((0, 2, 4))[0] > plain.replay((0, 2, 4))[0]


def test_updates_within_the_step_keep_shared_weights_in_one_stage() -> None:
    layers = tuple(LayerProfile(name=f"l{at}", forward=1.0, backward=2.0, parameters=4) for at in range(6))
    program = schedule("pipedream", 2, 4)
    with pytest.raises(StrettoError, match="shared weights in one stage"):
        partition(ModelProfile(layers, (SharedWeights((0, 5), 4),)), program)
    near = partition(ModelProfile(layers, (SharedWeights((2, 3), 4),)), program)
    assert near.stages in [(range(2), range(2, 6)), (range(4), range(4, 6))]


def test_a_large_model_is_cut_within_the_budget_with_a_bound() -> None:
    layers = tuple(
        LayerProfile(
            name=f"l{at}", forward=1 + at * at % 7, backward=2 + at % 5, parameters=4, activations=4, output=4
        )
        for at in range(60)
    )
    best = partition(ModelProfile(layers), schedule("interleaved", 8, 16, chunks=4), budget=2000)
    assert not best.proved
    assert 0.8 * best.seconds < best.bound < best.seconds
    assert best.seconds < min(best.start_seconds.values())


def test_more_stages_than_layers_is_an_error() -> None:
    with pytest.raises(StrettoError, match="3 layers over 4 stages"):
        partition(uneven(3, ()), schedule("1f1b", 4, 8))


def test_a_profile_reads_back_equal() -> None:
    import json

    layers = (
        LayerProfile(
            name="a", forward=0.5, backward=1.0, parameters=4, activations=8, output=16, weight=0.25, input=2
        ),
        LayerProfile(name="b", forward=1.0, backward=2.0),
    )
    profile = ModelProfile(layers, (SharedWeights((0, 1), 4),), "by hand")
    assert read_profile(json.dumps(profile_json(profile)), "file") == profile


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "p.json is not JSON"),
        ("{}", "no list of layers"),
        ('[{"forward_s": 1}]', r"layers\[0\] has no backward_s"),
        ('[{"forward_s": -1, "backward_s": 1}]', "forward_s is -1"),
        ('[{"forward_s": 1, "backward_s": NaN}]', "backward_s is nan"),
        ('[{"forward_s": 1, "backward_s": true}]', "backward_s is True"),
        ('[{"forward": 1, "backward_s": 1}]', "has 'forward'"),
        ('[{"forward_s": 1, "backward_s": 1, "weight_gradient_s": 2}]', "more than backward_s"),
        ('{"layers": [{"forward_s": 1, "backward_s": 1}], "shared": [{"layers": [0, 3]}]}', "shared has"),
    ],
)
def test_invalid_profiles_are_errors(text: str, message: str) -> None:
    with pytest.raises(StrettoError, match=message):
        read_profile(text, "p.json")
