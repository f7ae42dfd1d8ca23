"""Answers about layouts: equal to the command's, to the counts of a step, and to the engine's own cuts."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import pytest
import torch

from command_line import CommandLine
from stretto.engine.models.build import build
from stretto.engine.models.sharding import sharding_plan
from stretto.engine.parallel.parallelize import parallelize
from stretto.engine.parallel.tensor.sequence import SequenceSplit
from stretto.errors import StrettoError
from stretto.job.attention import AttentionShape, LatentShape
from stretto.job.experts import ExpertShape
from stretto.job.job import Job
from stretto.job.shape import ModelShape
from stretto.layout import Layout
from stretto.planner.counts.rank_parameters import Shares, layer_parameters
from stretto.planner.rank_step.counts import counts
from stretto.web.answers import reply_lines
from stretto.web.cuts import activation_part, cut_tensors, parameter_part
from stretto.web.layouts import count_traffic
from stretto.web.question_job import read_job

JOB: dict[str, Any] = {"tp": 4, "dp": 4, "pp": 2, "model": "llama3-8b", "cluster": "dgx-h100"}
SMALL = {"micro_batch": "1", "microbatches": "4", "seq": "4096"}


def ask(**question: Any) -> Any:
    """The answer or the error of a question, through the protocol."""
    *_, line = reply_lines(json.dumps(question))
    reply = json.loads(line)
    return reply.get("answer") or reply["error"]


def test_groups_are_those_of_the_command(stretto: CommandLine) -> None:
    degrees = {"tp": 2, "cp": 2, "dp": 4, "pp": 2, "ep": 4, "expert_tp": 1}
    printed = stretto.json(
        *("layout", "--world", 32, "--tp", 2, "--cp", 2, "--pp", 2, "--ep", 4, "--expert-tp", 1),
        *("--cluster", "dgx-a100-80gb"),
    )
    answer = ask(ask="layout", cluster="dgx-a100-80gb", **degrees)
    assert (answer["world"], answer["title"]) == (printed["world"], printed["layout"])
    for group, exchange in zip(answer["groups"], printed["exchanges"], strict=True):
        for name in ("axes", "size", "count", "inside", "links", "note"):
            assert group[name] == exchange[name]


@pytest.mark.parametrize(
    ("question", "message", "fix"),
    [
        ({"tp": 0}, "tp=0 is not allowed", "at least 1"),
        ({"tp": 3, "ep": 5}, "ep=5 with expert_tp=3", "the nearest ep is 1"),
        ({"order": "tp-dq"}, "unknown axis 'dq'", "did you mean 'dp'?"),
        ({"node": -1}, "node=-1", "at least 1"),
        ({"cluster": "/etc/cluster.yaml"}, "is not in the catalogue", "dgx-h100"),
        ({"cluster": "here:4"}, "is not in the catalogue", "dgx-h100"),
    ],
)
def test_illegal_layouts_have_the_nearest_fix(question: dict[str, Any], message: str, fix: str) -> None:
    error = ask(ask="layout", **question)
    assert message in error["message"]
    assert fix in error["hint"]


def test_no_file_of_the_machine_is_read_or_run() -> None:
    for more in ({"model": "/etc/config.json"}, {"fields": {"schedule": "mine.py:lifo"}}):
        error = ask(ask="traffic", **{**JOB, **more})
        assert "known" in error["message"] or "is a file" in error["message"]


def test_rows_of_traffic_add_up_to_what_leaves_the_rank() -> None:
    question = {**JOB, "fields": SMALL}
    job = read_job(question).job
    for rank in (0, 5, 31):
        answer = count_traffic({**question, "rank": rank})
        expected = counts(job, rank)
        assert sum(row["sent"] for row in answer["traffic"]) == pytest.approx(expected.sent, abs=1)
        assert answer["sent"] == expected.sent
    # what a stage sends forward is 4 microbatches of s x h / tp elements in 16 bits, to the next node's rank
    (forward,) = [row for row in count_traffic({**question, "rank": 5})["traffic"] if row["axes"] == "pp"]
    assert forward["bytes"] == forward["sent"] == 4 * 2 * 4096 * 4096 // 4
    assert (forward["calls"], forward["between"]["ranks"], forward["inside"]["count"]) == (4, [21], 0)


def test_keys_go_round_the_ring_to_the_rank_before() -> None:
    answer = count_traffic({**JOB, "tp": 1, "cp": 4, "rank": 2, "fields": SMALL})
    rings = [row for row in answer["traffic"] if row["axes"] == "cp"]
    assert {tuple(row["inside"]["ranks"]) for row in rings} == {(1,)}


# ------------------------------------------------------------------ cuts, against the engine's


@dataclass
class PlacedMesh:
    """The coordinates of one rank of a layout, without processes."""

    layout: Layout
    rank: int
    device: torch.device = torch.device("cpu")  # noqa: RUF009

    def size(self, axes: str) -> int:
        return self.layout.size(axes)

    def index(self, axes: str) -> int:
        return self.layout.index(self.rank, axes)

    def group(self, axes: str) -> Any:
        return None

    def split(self, axis: str, parts: int) -> Any:
        return (axis, parts)


GPT = ModelShape(family="gpt", layers=2, hidden=32, heads=4, vocab=101, sequence=16)
LLAMA = ModelShape(
    family="llama", layers=2, hidden=32, heads=8, kv_heads=2, head_dim=6, ffn=24, vocab=101, sequence=16
)
EXPERTS = replace(LLAMA, moe=ExpertShape(experts=4, ffn=20, shared_ffn=8))
LATENT = replace(
    LLAMA,
    kv_heads=8,
    head_dim=12,
    attention=AttentionShape(latent=LatentShape(kv_rank=8, rope_dim=4, value_dim=8, q_rank=10)),
)
T5 = ModelShape(family="t5", layers=1, hidden=32, heads=4, vocab=101, sequence=16)


def covered(shape: tuple[int, ...], boxes: list[tuple[int, int, int, int]]) -> torch.Tensor:
    mask = torch.zeros(prod(shape[:-1]), shape[-1], dtype=torch.int)
    for row, column, high, wide in boxes:
        mask[row : row + high, column : column + wide] += 1
    return mask


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        (GPT, Layout(tp=4)),
        (LLAMA, Layout(tp=2)),
        (LLAMA, Layout(tp=8)),  # four ranks share a key head
        (EXPERTS, Layout(tp=2, dp=2, ep=2, expert_tp=2)),
        (EXPERTS, Layout(tp=2, dp=2, ep=4, expert_tp=1)),
        (LATENT, Layout(tp=4)),
        (T5, Layout(tp=2)),
    ],
    ids=["gpt", "llama", "shared key heads", "experts", "whole experts", "latent", "t5"],
)
def test_parts_are_the_boxes_that_the_engine_gives_a_rank(shape: ModelShape, layout: Layout) -> None:
    multiple = 8
    job = Job(shape=shape, layout=layout, expert_tp=layout.expert_tp, vocab_multiple=multiple)
    shares = Shares(layout.tp, layout.ep, layout.size("expert_tp"), multiple)
    for rank in range(layout.world):
        with torch.device("meta"):
            model = build(shape)
        mesh: Any = PlacedMesh(layout, rank)
        table = parallelize(model, sharding_plan(job), mesh)
        index = {axis: layout.index(rank, axis) for axis in ("tp", "ep", "expert_tp")}
        seen = 0
        for layer in range(shape.chain):
            for parameter in layer_parameters(shape, layer, shares):
                part = parameter_part(parameter, shape, shares, index)
                elements = prod(part.local)
                assert elements == parameter.elements, parameter.name
                placed = next(each.placed for each in table.values() if parameter.name in each.names)
                counts = torch.zeros(parameter.plain, dtype=torch.int)
                for piece in placed.pieces:
                    piece.of_full(counts).add_(1)
                mask = covered(parameter.plain, [*part.global_boxes(0, elements)])
                assert torch.equal(mask, counts.reshape(mask.shape)), parameter.name
                seen += 1
        assert seen >= len(table)


@pytest.mark.parametrize("tensor", ["attn.qkv.weight", "mlp.down.weight", "tok.weight"])
def test_shards_of_all_copies_cover_a_weight_once(tensor: str) -> None:
    """In every ZeRO stage; a kind that is not sharded is on every copy."""
    question = {**JOB, "pp": 1, "cp": 2, "fields": SMALL, "tensor": tensor}
    layout = read_job(question).job.layout
    weights = [cut_tensors({**question, "rank": rank})["weight"] for rank in range(layout.world)]
    rows, columns = weights[0]["rows"], weights[0]["columns"]
    for mode, sharded in enumerate(
        ((), ("states",), ("states", "gradient"), ("states", "gradient", "weight"))
    ):
        for kind in ("weight", "gradient", "states"):
            boxes = [box for weight in weights for box in weight["modes"][mode][kind]["boxes"]]
            area = sum(high * wide for _, _, high, wide in boxes)
            copies = 1 if kind in sharded else 8
            assert area == copies * rows * columns, (mode, kind)
            over = {weight["modes"][mode][kind]["ranks"] for weight in weights}
            assert over == {8 if kind in sharded else 1}


def test_a_shard_of_a_flat_unit_is_of_the_parameters_that_lie_there() -> None:
    """With ZeRO 3 a layer's matrices are one flat unit: a rank's parts of them are its span."""
    matrices = ("attn.qkv.weight", "attn.proj.weight", "mlp.gate_up.weight", "mlp.down.weight")
    for rank in range(8):
        question = {**JOB, "tp": 1, "dp": 8, "pp": 1, "fields": SMALL, "rank": rank}
        modes = [cut_tensors({**question, "tensor": name})["weight"]["modes"][3] for name in matrices]
        (unit,) = {tuple(mode["unit"]["names"]) for mode in modes}
        assert sorted(unit) == sorted(f"blocks.0.{name}" for name in matrices)
        start, stop = modes[0]["weight"]["span"]
        assert sum(mode["weight"]["elements"] for mode in modes) == stop - start


@pytest.mark.parametrize("layout", [Layout(cp=4), Layout(tp=2, cp=2), Layout(tp=4)], ids=str)
def test_positions_are_those_of_the_engine(layout: Layout) -> None:
    """30 positions are padded, those of context parallelism in zigzag order."""
    job = Job(shape=replace(LLAMA, sequence=30), layout=layout, sequence_parallel=layout.tp > 1)
    for rank in range(layout.world):
        mesh: Any = PlacedMesh(layout, rank)
        split = SequenceSplit.of(mesh, 30, job.sequence_parallel)
        for kind, expected in (("residual", split.shard), ("heads", split.positions)):
            part = activation_part(job, rank, kind)
            positions = [p for row, _, size, _ in part["boxes"] for p in range(row, row + size)]
            assert positions == expected.tolist()
            assert part["local"][0] == len(positions)


def test_all_ranks_together_have_an_activation_once() -> None:
    for context in ("ring", "ulysses"):
        shape = replace(LLAMA, kv_heads=8, sequence=32)
        job = Job(shape=shape, layout=Layout(tp=2, cp=2), context=context, sequence_parallel=True)
        for kind in ("residual", "heads", "mlp", "logits"):
            parts = [activation_part(job, rank, kind) for rank in range(4)]
            area = sum(high * wide for part in parts for _, _, high, wide in part["boxes"])
            assert area == parts[0]["rows"] * parts[0]["columns"], (context, kind)


def test_a_rank_of_another_stage_has_none_of_the_embedding() -> None:
    answer = cut_tensors({**JOB, "fields": SMALL, "tensor": "tok.weight", "rank": 31})
    assert answer["weight"] is None
    assert "tok.weight" in answer["choices"]
    with pytest.raises(StrettoError, match="rank 32 is outside"):
        cut_tensors({**JOB, "fields": SMALL, "rank": 32})
