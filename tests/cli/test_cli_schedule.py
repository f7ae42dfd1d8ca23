"""`stretto schedule`."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from command_line import CommandLine
from stretto.cli.schedule import parse_times
from stretto.errors import StrettoError
from stretto.program import names
from stretto.program.replay import Costs

SMALL = ("1f1b", "--ranks", "4", "--microbatches", "8")


def test_json_of_1f1b(stretto: CommandLine) -> None:
    report = stretto.json("schedule", *SMALL)
    assert (report["name"], report["ranks"], report["stages"], report["microbatches"]) == ("1f1b", 4, 4, 8)
    # (m + p - 1) slots of F + B; one slot is 3
    assert report["makespan"] == 33
    assert report["ideal"] == 24
    assert report["bubble"]["barrier"] == 9
    assert report["bubble"]["rate"] == pytest.approx(9 / 33)
    assert report["peak_activations"] == [4, 3, 2, 1]
    assert report["weight_versions"] == [1, 1, 1, 1]
    assert report["transfers"] == 2 * 3 * 8
    assert report["orders"][3][:4] == ["3F0", "3B0", "3F1", "3B1"]
    assert [len(order) for order in report["orders"]] == [16] * 4


def test_lowered_adds_communications(stretto: CommandLine) -> None:
    plain, lowered = stretto.json("schedule", *SMALL), stretto.json("schedule", *SMALL, "--lowered")
    assert lowered["makespan"] == plain["makespan"]
    assert "0SEND_F0" in lowered["orders"][0]
    assert "0REDUCE_GRAD" in lowered["orders"][0]
    assert "rank 0: 0F0 0SEND_F0" in stretto("schedule", *SMALL, "--lowered")
    assert not any("SEND" in action for order in plain["orders"] for action in order)


def test_both_definitions_of_the_bubble_are_shown(stretto: CommandLine) -> None:
    """Megatron-LM's papers count (p - 1) / m, the idle time over the ideal; others the share of the step."""
    bubble = stretto.json("schedule", "1f1b", "--ranks", "4", "--microbatches", "8")["bubble"]
    assert bubble["over_ideal"] == pytest.approx(3 / 8)
    assert bubble["rate"] == pytest.approx(3 / 11)
    assert "9: 27.3% of the makespan, 37.5% of the ideal 24" in stretto(
        "schedule", "1f1b", "--ranks", "4", "--microbatches", "8"
    )


def test_times_reach_the_replay(stretto: CommandLine) -> None:
    report = stretto.json("schedule", *SMALL, "--times", "F=2,I=3,W=1")
    assert report["makespan"] == 11 * 6
    assert stretto.json("schedule", *SMALL, "--times", "hop=0.5")["makespan"] > 33


def test_chunks_and_group_reach_the_schedule(stretto: CommandLine) -> None:
    report = stretto.json(
        "schedule", "interleaved", "--ranks", "2", "--microbatches", "4", "--chunks", "3", "--group", "4"
    )
    assert report["stages"] == 6
    assert report["orders"][0][:5] == ["0F0", "0F1", "0F2", "0F3", "2F0"]


def test_text_shows_rows_and_figures(stretto: CommandLine) -> None:
    shown = stretto("schedule", *SMALL)
    assert "makespan 33, bubble 27.3% at F = I = W = 1" in shown
    assert "rank 0  F0-F1-F2-F3-" in shown
    assert "\x1b" not in shown


def test_list(stretto: CommandLine) -> None:
    assert [line.split()[0] for line in stretto("schedule", "--list").splitlines()] == list(names())
    assert [entry["name"] for entry in stretto.json("schedule", "--list")["schedules"]] == list(names())


def test_svg(tmp_path: Path, stretto: CommandLine) -> None:
    path = tmp_path / "picture.svg"
    assert f"wrote {path}" in stretto("schedule", *SMALL, "--svg", str(path))
    assert ET.parse(path).getroot().tag.endswith("svg")


def test_a_program_goes_out_and_comes_back_as_csv(tmp_path: Path, stretto: CommandLine) -> None:
    path = tmp_path / "mine.csv"
    arguments = ("interleaved", "--ranks", "2", "--microbatches", "4", "--chunks", "2")
    out = stretto.json("schedule", *arguments, "--write", str(path))
    back = stretto.json("schedule", "--file", str(path))
    assert back["name"] == "mine"
    shared_keys = out.keys() - {"name", "parameters"}  # the format has no room for them
    assert {key: back[key] for key in shared_keys} == {key: out[key] for key in shared_keys}
    path.write_text("0F0,0X0\n")
    assert f"error: {path}: line 1 column 5" in stretto.error("schedule", "--file", str(path))


def test_times_as_text() -> None:
    assert parse_times("F=1,I=1,W=1,hop=0") == Costs()
    assert parse_times(" I=0.5, hop=2") == Costs(I=0.5, hop=2)
    for text, says in (
        ("f=1", "'f'"),
        ("F=x", "'F=x'"),
        ("F=1,F=2", "twice"),
        ("F=-1", "-1"),
        ("F=nan", "nan"),
    ):
        with pytest.raises(StrettoError, match=says):
            parse_times(text)


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (["1f1c", "--ranks", "2", "--microbatches", "2"], "'1f1c'", "1f1b"),
        (["1f1c"], "'1f1c'", "1f1b"),
        (["1f1b", "--ranks", "2"], "--microbatches", "--ranks 4 --microbatches 8"),
        ([], "no schedule named", "--list"),
        ([*SMALL, "--times", "G=1"], "'G'", "F=1,I=1,W=1,hop=0"),
        (["--file", "absent.csv"], "cannot read absent.csv", "name"),
        ([*SMALL, "--from", "9", "--to", "7"], "between --from 9 and --to 7", "--from below --to"),
        ([*SMALL, "--from", "90"], "between --from 90 and", "below "),
        ([*SMALL, "--to", "0"], "between --from 0 and --to 0", "--from below --to"),
    ],
)
def test_bad_input(arguments: list[str], error: str, hint: str, stretto: CommandLine) -> None:
    first, second = stretto.error("schedule", *arguments).splitlines()
    assert first.startswith("error: ")
    assert error in first
    assert hint in second


def test_a_window_of_steps(stretto: CommandLine) -> None:
    size = ("--ranks", "4", "--microbatches", "8", "--steps", "5")
    for name in ("pipedream", "pipedream-2bw"):
        report = stretto.json("schedule", name, *size)
        assert (report["steps"], report["microbatches"]) == (5, 40)
        assert report["bubble"]["rate"] == pytest.approx(3 / 43)
    text = stretto("schedule", "pipedream", *size)
    assert "4 ranks, 40 microbatches in 5 steps: makespan 129, bubble 7.0%" in text
    assert "bubble until all meet 9 (1.8 a step)" in text
    assert "steps is 5, but schedule '1f1b' takes no steps" in stretto.error("schedule", "1f1b", *size)


def test_a_part_of_the_timeline(stretto: CommandLine) -> None:
    text = stretto("schedule", "1f1b", "--ranks", "2", "--microbatches", "3", "--from", "3", "--to", "9")
    assert "rank 0  ···B0----F2-B1----\nrank 1  B0-F1-B1----F2-B2-\n" in text
