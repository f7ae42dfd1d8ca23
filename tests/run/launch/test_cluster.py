"""What every launcher starts: limits of its values, time limits, ranks shared out over nodes, YAML."""

from __future__ import annotations

import pytest
import yaml

from stretto.errors import StrettoError
from stretto.run.launch.cluster import ClusterJob, nodes_of, yaml_text


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        (None, None),
        ("90", 90 * 60),
        ("90:30", 90 * 60 + 30),
        ("2:03:04", 2 * 3600 + 3 * 60 + 4),
        ("1-2", 26 * 3600),
        ("1-2:03", 26 * 3600 + 180),
        ("1-02:03:04", 26 * 3600 + 184),
    ],
)
def test_time_limits(time: str | None, seconds: int | None) -> None:
    job = ClusterJob(name="a", config="a.yaml", layout="dp=1", nodes=1, ranks_per_node=1, time=time)
    assert job.time_s == seconds


@pytest.mark.parametrize(
    ("world", "given", "expected"),
    [
        (1, {}, (1, 1)),
        (8, {}, (1, 8)),
        (24, {}, (3, 8)),
        (24, {"devices_per_node": 4}, (6, 4)),
        (2, {"devices_per_node": 4}, (1, 2)),
        (24, {"devices_per_node": 0}, (3, 8)),
        (24, {"nodes": 2}, (2, 12)),
        (24, {"nodes": 4, "devices_per_node": 8}, (4, 6)),
    ],
)
def test_ranks_fill_nodes(world: int, given: dict[str, int], expected: tuple[int, int]) -> None:
    assert nodes_of(world, "dp", **given) == expected


def test_a_world_that_nodes_do_not_divide_names_the_fullest_that_do() -> None:
    with pytest.raises(StrettoError) as caught:
        nodes_of(28, "dp=28")
    assert caught.value.message == "gpus_per_node=8 does not divide the 28 ranks of layout dp=28"
    assert caught.value.hint == "use --nodes 4 --ranks-per-node 7, or another layout"


def test_yaml_reads_back_and_keeps_the_lines_of_scripts() -> None:
    same = ["x"]
    documents = [{"run": "set -u\nexec a\n", "on": "yes", "list": same, "again": same}, {"b": 1}]
    text = yaml_text(["head"], *documents)
    assert text.startswith("# head\nrun: |\n  set -u\n  exec a\n")
    assert "&" not in text
    assert list(yaml.safe_load_all(text)) == documents
