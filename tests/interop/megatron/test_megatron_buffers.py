"""Adam's states come out of the flat buffers of ranks, each proved to be of its parameter; else an error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_buffers import FUSED, PLAIN, Ranks, buffers

import megatron_models as megatron
from stretto.engine.checkpoint.read import read_whole
from stretto.errors import StrettoError
from stretto.job.experts import ExpertShape
from stretto.job.shape import ModelShape
from stretto_interop.checkpoints.megatron.importing import MegatronImport

SIZES: dict[str, Any] = {"layers": 4, "hidden": 16, "heads": 4, "vocab": 32, "sequence": 12}
GPT = ModelShape(family="gpt", **SIZES)
LLAMA = ModelShape(family="llama", kv_heads=2, ffn=24, **SIZES)
MOE = replace(LLAMA, moe=ExpertShape(experts=4, top_k=2))
MOMENTS = ("exp_avg", "exp_avg_sq")
FOUR = ((0, 1), (2, 3))


def written(folder: Path, shape: ModelShape, ranks: Ranks, **args: Any) -> tuple[Path, Path]:
    """A checkpoint with states in buffers, and the same with states as the weights are."""
    exact = megatron.weights(shape)
    half = {name: tensor.bfloat16() for name, tensor in exact.items()}
    generator = torch.Generator().manual_seed(1)
    states = {
        kind: {n: torch.rand(t.shape, generator=generator) for n, t in exact.items()} for kind in MOMENTS
    }
    states["param"] = exact
    more = {"bf16": True, "consumed_train_samples": 24, **args}
    there = megatron.write(folder / "there", shape, half, extra=buffers(shape, states, ranks), args=more)
    per_tensor = megatron.write(
        folder / "whole", shape, half, states=states, args=more, optimiser=megatron.adam(7, tensor=False)
    )
    return there, per_tensor


def imported(source: Path, run: Path, shape: ModelShape) -> dict[str, torch.Tensor]:
    with MegatronImport(source, shape) as opened:
        assert opened.optimiser is not None
        assert (opened.updates, opened.samples, opened.optimiser.lr) == (7, 24, 1e-2)
        return read_whole(opened.write(run), "")[0]


def cut_over(ranks: Ranks, **more: Any) -> dict[str, Any]:
    """Megatron's arguments that say it."""
    return {
        "tensor_model_parallel_size": ranks.tp,
        "pipeline_model_parallel_size": ranks.pp,
        "expert_model_parallel_size": ranks.ep,
        **more,
    }


@pytest.mark.parametrize(
    ("shape", "ranks"),
    [
        (GPT, Ranks(stages=((0, 1, 2, 3),))),
        (GPT, Ranks(tp=2, pp=2, stages=((0,), (1, 2, 3)), limit=900, modules=PLAIN)),
        (replace(GPT, tied=False), Ranks(tp=2, pp=2, stages=FOUR, limit=700)),
        (LLAMA, Ranks(tp=2, pp=2, stages=FOUR, limit=1500)),
        (LLAMA, Ranks(tp=2, pp=2, stages=((0,), (1,), (2,), (3,)), limit=1500, modules=PLAIN)),
        (LLAMA, Ranks(pp=3, stages=((), (0, 1, 2, 3), ()), limit=100)),
        pytest.param(MOE, Ranks(tp=2, pp=2, stages=FOUR, limit=1500, grouped=False), marks=pytest.mark.slow),
        (MOE, Ranks(tp=2, pp=2, ep=2, stages=FOUR, limit=1500)),
        (MOE, Ranks(tp=1, pp=2, ep=4, stages=FOUR, limit=1500, grouped=False)),
    ],
    ids=["gpt", "gpt-tied", "gpt-untied", "llama", "chunks", "uneven", "moe", "moe-ep2", "moe-ep4"],
)
def test_states_of_buffers_are_those_of_whole_tensors(
    tmp_path: Path, shape: ModelShape, ranks: Ranks
) -> None:
    there, per_tensor = written(tmp_path, shape, ranks, **cut_over(ranks))
    from_buffers, from_tensors = (
        imported(source, tmp_path / f"run-{source.name}", shape) for source in (there, per_tensor)
    )
    assert from_buffers.keys() == from_tensors.keys()
    assert all(torch.equal(from_buffers[name], from_tensors[name]) for name in from_tensors)
    assert sum(name.startswith("optim.") for name in from_buffers) == 2 * sum(
        name.startswith("model.") for name in from_buffers
    )


def test_the_ranks_are_found_without_arguments(tmp_path: Path) -> None:
    """Of NeMo's checkpoints, which have none."""
    ranks = Ranks(tp=2, pp=2, stages=FOUR, limit=1500)
    there, per_tensor = written(tmp_path, LLAMA, ranks)
    from_buffers, from_tensors = (
        imported(source, tmp_path / f"run-{source.name}", LLAMA) for source in (there, per_tensor)
    )
    assert all(torch.equal(from_buffers[name], from_tensors[name]) for name in from_tensors)


SWAPPED = tuple({"linear_qkv": "linear_fc2", "linear_fc2": "linear_qkv"}.get(name, name) for name in FUSED)
RANKS = Ranks(tp=2, pp=2, stages=FOUR, limit=1500)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (replace(RANKS, modules=SWAPPED, limit=10**9), "float32 weights that round to the model's"),
        (replace(RANKS, aligned=32), r"gives buffers of [\d, ]+ elements"),
        (replace(RANKS, swapped={0: 1, 1: 0}), "float32 weights that round to the model's"),
    ],
    ids=["order", "padding", "layers"],
)
def test_another_order_is_refused(tmp_path: Path, ranks: Ranks, message: str) -> None:
    there, _ = written(tmp_path, LLAMA, ranks, **cut_over(ranks))
    with pytest.raises(StrettoError, match=message) as refused:
        MegatronImport(there, LLAMA)
    assert "--dist-ckpt-optim-fully-reshardable" in str(refused.value.hint)
    with MegatronImport(there, LLAMA, states=False) as opened:
        opened.write(tmp_path / "run")


def test_layers_taken_for_one_another_are_refused_as_they_are_read(tmp_path: Path) -> None:
    ranks = replace(RANKS, swapped={2: 3, 3: 2})
    there, _ = written(tmp_path, LLAMA, ranks, **cut_over(ranks))
    with (
        MegatronImport(there, LLAMA) as opened,
        pytest.raises(StrettoError, match=r"blocks\.2\..* do not round"),
    ):
        opened.write(tmp_path / "run")
    assert not list(tmp_path.glob("run/checkpoints/step-*"))


def test_float32_weights_of_another_parameter_are_refused_in_every_form(tmp_path: Path) -> None:
    """Whole tensors too: Megatron-core 0.16.1 writes zeros in them where it has padded buckets."""
    exact = megatron.weights(LLAMA)
    half = {name: tensor.bfloat16() for name, tensor in exact.items()}
    exact["embedding.word_embeddings.weight"][-4:] = 0
    states: dict[str, megatron.Tensors] = dict.fromkeys((*MOMENTS, "param"), exact)
    source = megatron.write(tmp_path / "there", LLAMA, half, states=states, optimiser=megatron.adam(7))
    with (
        MegatronImport(source, LLAMA) as opened,
        pytest.raises(StrettoError, match=r"embed\.tok\.weight: .* do not round"),
    ):
        opened.write(tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0", "lacks buffers"),
        ("dp_group_idx_1.", "lacks buffers of the optimiser: number 1 of 3"),
        ("exp_avg_sq", "are not exp_avg, exp_avg_sq, param in float32"),
    ],
)
def test_missing_buffers_are_named(tmp_path: Path, name: str, message: str) -> None:
    exact = megatron.weights(LLAMA)
    extra = buffers(LLAMA, dict.fromkeys((*MOMENTS, "param"), exact), RANKS)
    left = {tensor_name: value for tensor_name, value in extra.items() if name not in tensor_name}
    assert len(left) < len(extra)
    source = megatron.write(tmp_path / "there", LLAMA, exact, extra=left, args=cut_over(RANKS))
    with pytest.raises(StrettoError, match=message):
        MegatronImport(source, LLAMA)


def test_buffers_without_their_buckets_are_refused(tmp_path: Path) -> None:
    exact = megatron.weights(LLAMA)
    extra = {"optimizer.distributed.dp_group_idx_0.param_state/shard_0_1": megatron.saved([{}])}
    source = megatron.write(tmp_path / "there", LLAMA, exact, extra=extra)
    with pytest.raises(StrettoError, match="as dp_zero_gather_scatter, which does not record") as refused:
        MegatronImport(source, LLAMA)
    assert "--dist-ckpt-optim-fully-reshardable" in str(refused.value.hint)


def test_buffers_of_several_types_are_refused(tmp_path: Path) -> None:
    """With fp8 parameters there is a buffer for them beside the other."""
    exact = megatron.weights(LLAMA)
    extra = buffers(LLAMA, dict.fromkeys((*MOMENTS, "param"), exact), RANKS)
    more = {
        n.replace("gbuf_idx_0.dtype_(torch.bfloat16", "gbuf_idx_1.dtype_(torch.uint8"): v
        for n, v in extra.items()
    }
    source = megatron.write(tmp_path / "there", LLAMA, exact, extra={**extra, **more}, args=cut_over(RANKS))
    with pytest.raises(StrettoError, match=r"torch\.uint8, torch\.float32; those of one type"):
        MegatronImport(source, LLAMA)
