"""Programs as text and back."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import StrettoError
from stretto.program import Action, ActionKind, Program, ScheduleError, check, lower, schedule
from stretto.program.pairing import as_blocks
from stretto.program.text import from_csv, from_json, parse_action, to_csv, to_json
from stretto.program.transforms.activations import offload, recompute
from stretto.program.transforms.sharding import gather

PROGRAMS = [
    schedule("naive", 2, 2),
    schedule("gpipe", 1, 1),
    schedule("1f1b", 3, 5),
    schedule("interleaved", 2, 5, chunks=3),
]
PROGRAMS += [
    schedule("pipedream", 2, 3),
    schedule("pipedream-2bw", 2, 3, group=2, steps=2),
    schedule("dualpipe", 2, 4),
    schedule("dualpipe-v", 2, 5),
    gather(recompute(schedule("dualpipe-v", 2, 4))),
    offload(schedule("gpipe", 2, 3)),
]
LOWERED = [
    lower(p, ((0, p.stages - 1),) if p.stages > 1 and not p.versions and p.copies == 1 else ())
    for p in PROGRAMS
]


def actions() -> st.SearchStrategy[Action]:
    stage, microbatch = st.integers(0, 10**6), st.integers(0, 10**6)
    with_microbatch = [kind for kind in ActionKind if kind.has_microbatch]
    without = [kind for kind in ActionKind if kind not in with_microbatch]
    return st.one_of(
        st.builds(Action, stage, st.sampled_from(with_microbatch), microbatch),
        st.builds(Action, stage, st.sampled_from(without), st.none()),
        st.builds(Action, stage, st.just(ActionKind.UPDATE), microbatch),
    )


@given(actions())
def test_actions_round_trip(action: Action):
    assert parse_action(str(action)) == action


@given(st.text(alphabet="0123FBIWSENDRCVU_ GATI\n-", max_size=12))
def test_what_is_parsed_is_written_the_same(text: str):
    try:
        action = parse_action(text)
    except StrettoError:
        return
    assert str(action) == text


@pytest.mark.parametrize(
    "text", ["", "F0", "0F", "0X0", "00F0", "0F00", "-1F0", "0F0 ", "0f0", "٣F0", "0F0,", "0REDUCE_GRAD1"]
)
def test_what_is_no_action(text: str):
    with pytest.raises(StrettoError):
        parse_action(text)


@pytest.mark.parametrize("program", PROGRAMS + LOWERED)
def test_json_round_trip(program: Program):
    assert from_json(to_json(program)) == program
    assert json.loads(to_json(program))["version"] == 3


@pytest.mark.parametrize("program", PROGRAMS + LOWERED)
def test_csv_round_trip(program: Program):
    back = from_csv(
        to_csv(program),
        placement=program.placement,
        name=program.name,
        lowered=program.lowered,
        copies=program.copies,
        tied=program.tied,
        versions=program.versions if program.name == "pipedream-2bw" else None,  # else the newest
        steps=program.steps,
    )
    assert back.orders == as_blocks(program).orders
    assert (back.tied, back.pairs, back.versions) == (program.tied, program.pairs, program.versions)
    assert (back.placement, back.microbatches, back.lowered) == (
        program.placement,
        program.microbatches,
        program.lowered,
    )
    assert back.steps == program.steps


def test_csv_infers_what_it_leaves_out():
    text = to_csv(LOWERED[3])
    back = from_csv(text)
    assert (back.placement, back.microbatches, back.lowered, back.trains) == ((0, 1) * 3, 5, True, True)
    assert not from_csv("0F0,0F1\n1F0,1F1\n").trains


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no action"),
        ("0F0,0B0\n\n", "line 2 has no action"),
        ("0F0,0B0\n1F0, 1X0\n", "line 2 column 6: '1X0' is not an action"),
        ("0F0,0B\n", "line 1 column 5: '0B' has no microbatch"),
        ('"0F0",0B0\n', "line 1 column 1: '\"0F0\"' is not an action"),
        ("0F0\n0B0\n", "line 2 column 1 has stage 0, which is in line 1 too"),
        ("0F0,0B0\n2F0,2B0\n", "stage 1 has no action, but stage 2 has"),
        ("999999999F0\n", "stage 0 has no action"),
        (
            "0F0,(0B0;0F1)OVERLAP_F_B\n",
            "line 1 column 5: '(0B0;0F1)OVERLAP_F_B' is not a forward and a backward",
        ),
        ("0F0,(0F1;0B0)OVERLAP\n", "line 1 column 5: '(0F1;0B0)OVERLAP' is not an overlapped pair"),
        ("0F0,(0F1)OVERLAP_F_B\n", "is not an overlapped pair"),
        ("0F0,(0F1;0B0\n", "is not an overlapped pair"),
        ("0F0,(0F1;0B)OVERLAP_F_B,0B1\n", "line 1 column 5: '0B' has no microbatch"),
        ("(0F0;0B0)OVERLAP_F_B\n", "the pair of 0F0 and 0B0 cannot be: the backward needs the forward"),
        ("0F999999999,0B999999999\n", "microbatches is 1000000000, but there are 2 actions"),
        ("0F999999999,0B999999999,0U0\n", "microbatches is 1000000000, but there are 3 actions"),
        ("0F0,0REDUCE_GRAD2,0B0\n", "line 1 column 5: '0REDUCE_GRAD2' has a microbatch"),
    ],
)
def test_csv_that_is_none(text: str, says: str):
    with pytest.raises(StrettoError) as caught:
        from_csv(text)
    assert says in str(caught.value)


def test_csv_is_checked():
    with pytest.raises(ScheduleError, match="rank 0 never does 0B1"):
        from_csv("0F0,0F1,0B0\n")
    with pytest.raises(ScheduleError, match="deadlock"):
        from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    with pytest.raises(ScheduleError, match="stage 1 is on rank 0"):
        from_csv("0F0,0B0\n1F0,1B0\n", placement=(0, 0))


def edited(**fields: object) -> str:
    return json.dumps(json.loads(to_json(PROGRAMS[2])) | fields)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "line 1 column 1"),
        ('{"format": "stretto.program",\n "version": }', "line 2 column 13"),
        ("[]", "no program"),
        ("[" * 100_000, "no program"),
        ("1" * 10_000, "no program"),
        ('{"format": "other"}', "no program"),
        (edited(version=4), "the text: the program has version 4, written by a newer Stretto"),
        (edited(version=True), "version of the program is 'True', must be a whole number from 1 to 3"),
        (edited(version=[]), "version of the program is '[]', must be a whole number from 1 to 3"),
        (edited(version=2), "unknown field 'steps'"),
        (edited(steps=2), "steps is 2, must divide the 5 microbatches"),
        (edited(steps=5), "steps is 5, but the program has no weight versions"),
        (edited(steps=0), "steps is 0, must divide"),
        (edited(steps="1"), "steps is '1', must be a whole number"),
        (edited(version=1), "unknown field 'copies'"),
        (edited(copies=2), "copies is 2, must divide the 3 stages"),
        (edited(copies=0), "copies is 0, must divide"),
        (edited(copies=-1), "copies is -1"),
        (edited(pairs=[["0F1"]]), "pairs[0] is ['0F1'], must be a forward and a backward"),
        (edited(pairs=[["0F1", "B"]]), "pairs[0][1]: 'B' is not an action"),
        (edited(pairs=[["0F0", "0B4"]]), "the pair of 0F0 and 0B4 is not in the program"),
        (edited(pairs=[["0F1", "0B0"], ["0U", "0B0"], ["0U1", "0U"]]), "is not a forward and a backward"),
        (edited(pairs="0F0"), "pairs is '0F0', must be a list"),
        (edited(versions=[[0] * 5] * 2), "versions has rows of lengths [5, 5], must have 3 rows"),
        (edited(versions=[[0] * 5] * 3), "rank 0 has no U of stage 0 after the gradient of 4"),
        (edited(versions=[0]), "versions[0] is 0, must be a list"),
        (edited(microbatches=10**12), "microbatches is 1000000000000, but there are 30 actions in all"),
        (edited(rank=2), "unknown field 'rank'"),
        ('{"format": "stretto.program", "version": 1}', "field 'name' is missing"),
        (edited(name=3), "name is 3, must be a str"),
        (edited(lowered="yes"), "lowered is 'yes', must be a bool"),
        (edited(microbatches=True), "microbatches is True"),
        (edited(microbatches=0), "microbatches is 0"),
        (edited(placement=[0, 1, -1]), "placement[2] is -1"),
        (edited(placement=[0, 1, 7]), "must name ranks 0 to 2"),
        (edited(parameters={"chunks": 1.5}), "parameters.chunks is 1.5"),
        (edited(tied=[[0, 9]]), "tied set is (0, 9)"),
        (edited(tied=[0]), "tied[0] is 0, must be a list"),
        (edited(orders=["0F0"]), "orders[0] is '0F0', must be a list"),
        (edited(orders=[["0F0", 1]]), "orders[0][1] is 1"),
        (edited(orders=[["0F0", "0Q0"]]), "orders[0][1]: '0Q0' is not an action"),
        (edited(orders=[["0F0", "0B0"]]), "placement is (0, 1, 2), must name ranks 0 to 0"),
    ],
)
def test_json_that_is_no_program(text: str, says: str):
    with pytest.raises(StrettoError) as caught:
        from_json(text)
    assert says in str(caught.value)


def test_json_of_earlier_versions_is_read():
    late = schedule("pipedream", 2, 3)
    fields = json.loads(to_json(late)) | {"version": 2}
    del fields["steps"]
    assert from_json(json.dumps(fields)) == late
    program = schedule("1f1b", 2, 3)
    fields = json.loads(to_json(program)) | {"version": 1}
    for added in ("copies", "pairs", "versions", "steps"):
        del fields[added]
    assert from_json(json.dumps(fields)) == program
    with pytest.raises(StrettoError, match="field 'versions' is missing"):
        from_json(json.dumps(fields | {"version": 2, "copies": 1, "pairs": []}))


def test_csv_takes_versions_and_copies():
    late = "0F0,0B0,0U0,0F1,0B1,0U1\n"
    assert from_csv(late).versions == ((0, 1),)
    with pytest.raises(ScheduleError, match="uses version 1 of the weights, but there are 0 to 0"):
        from_csv(late, versions=[(1, 1)])
    assert check(from_csv("0F0,0F1,0B0,0U0,0B1,0U1\n")).weight_delays == ((0, 1),)
    text = to_csv(schedule("dualpipe", 2, 4))
    with pytest.raises(ScheduleError):
        from_csv(text)
    assert from_csv(text, copies=2).orders == schedule("dualpipe", 2, 4).orders


DOCUMENT = (Path(__file__).parents[2] / "docs" / "reference" / "program-format.md").read_text()


def test_the_documented_example_is_what_is_written():
    example = re.search(r"```json\n(.*?)```", DOCUMENT, re.DOTALL)
    assert example is not None
    assert from_json(example[1]) == schedule("1f1b", 2, 2)
    assert list(json.loads(example[1])) == list(json.loads(to_json(schedule("1f1b", 2, 2))))


def test_every_kind_and_field_is_documented():
    rows = [line.split("|")[1] for line in DOCUMENT.splitlines() if line.startswith("|")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named >= {str(kind) for kind in ActionKind} | set(json.loads(to_json(PROGRAMS[0])))


def programs_of_noise() -> st.SearchStrategy[str]:
    """Files with every field of its own type and nothing that fits."""
    number = st.integers(0, 4)
    action = st.builds(
        lambda stage, kind, i: f"{stage}{kind}{i if kind.has_microbatch else ''}",
        st.integers(0, 2),
        st.sampled_from(list(ActionKind)),
        st.integers(0, 2),
    )
    lists = st.lists(st.lists(number, max_size=3), max_size=3)
    return st.builds(
        lambda **fields: edited(**fields),
        placement=st.lists(st.integers(0, 2), min_size=1, max_size=4),
        microbatches=st.integers(0, 3),
        tied=lists,
        lowered=st.booleans(),
        trains=st.booleans(),
        copies=number,
        pairs=st.lists(st.lists(action, min_size=2, max_size=2), max_size=2),
        versions=lists,
        steps=number,
        orders=st.lists(st.lists(action, max_size=6), max_size=3),
    )


@given(programs_of_noise())
def test_noise_is_refused_in_words(text: str):
    with suppress(StrettoError):
        from_json(text)


@given(st.sampled_from(PROGRAMS + LOWERED), st.data())
def test_a_program_with_one_field_of_noise_is_refused_in_words(program: Program, data: st.DataObject):
    fields, noise = json.loads(to_json(program)), json.loads(data.draw(programs_of_noise()))
    for name in data.draw(st.sets(st.sampled_from(sorted(fields)), min_size=1, max_size=2)):
        fields[name] = noise[name]
    with suppress(StrettoError):
        from_json(json.dumps(fields))
