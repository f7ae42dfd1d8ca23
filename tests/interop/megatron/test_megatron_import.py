"""Checkpoints as Megatron writes them become ours: the same logits, and the optimiser goes on."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_models as megatron
from stretto.engine.checkpoint.read import read_whole
from stretto.engine.models.build import build
from stretto.errors import StrettoError
from stretto.job.shape import ModelShape
from stretto.run.config import TrainConfig
from stretto.run.data.dataset import WindowSamples
from stretto.run.data.token_folder import TokenFolder
from stretto_interop.checkpoints.megatron.common import COMMON, find_iteration, read_common
from stretto_interop.checkpoints.megatron.importing import MegatronImport
from stretto_interop.frameworks.megatron.framework import read_saved
from texts import open_tokens
from tiny_job import LLAMA, job
from train_runs import tensors, train

SIZES: dict[str, Any] = {"layers": 2, "hidden": 16, "heads": 4, "vocab": 32, "sequence": 12}
GPT = ModelShape(family="gpt", **SIZES)
LLAMA_SHAPE = ModelShape(family="llama", kv_heads=2, ffn=24, **SIZES)
MOMENTS = ("exp_avg", "exp_avg_sq")


def random_states(native: megatron.Tensors, *kinds: str) -> dict[str, megatron.Tensors]:
    generator = torch.Generator().manual_seed(1)
    return {
        kind: {name: torch.rand(t.shape, generator=generator) for name, t in native.items()} for kind in kinds
    }


def imported(source: Path, run: Path, shape: ModelShape, *, states: bool = True) -> Path:
    with MegatronImport(source, shape, states=states) as opened:
        return opened.write(run)


@pytest.mark.parametrize("form", ["stacked", "apart"])
@pytest.mark.parametrize(
    "shape", [GPT, replace(GPT, tied=False), LLAMA_SHAPE], ids=["gpt", "untied", "llama"]
)
def test_an_imported_model_gives_the_same_logits(tmp_path: Path, shape: ModelShape, form: str) -> None:
    native = megatron.weights(shape, torch.float64)
    source = megatron.write(tmp_path / "there", shape, native, form=form)
    saved = read_saved(read_common(find_iteration(source)).args, "common.pt")
    assert saved.shape == replace(shape, family=saved.shape.family)
    model = build(saved.shape)
    model.double().tie()
    model.load_state_dict(read_whole(imported(source, tmp_path / "run", saved.shape))[0], strict=False)
    tokens = torch.randint(0, shape.vocab, (2, 10), generator=torch.Generator().manual_seed(5))
    wanted = megatron.forward(shape, native, tokens)
    assert wanted.abs().max() > 0.5
    assert torch.allclose(model(tokens), wanted, atol=1e-12)


@pytest.mark.parametrize("form", ["stacked", "apart", "flat"])
@pytest.mark.parametrize("masters", ["fp32_param", "param"])
def test_states_come_as_they_are_stored(tmp_path: Path, form: str, masters: str) -> None:
    """Whole, layer by layer, or in flat pieces; float32 weights beside bfloat16 ones win."""
    exact = megatron.weights(LLAMA_SHAPE)
    half = {name: tensor.bfloat16() for name, tensor in exact.items()}
    states = random_states(exact, *MOMENTS)
    source = megatron.write(
        tmp_path / "there",
        LLAMA_SHAPE,
        half,
        states={**states, masters: exact},
        states_form=form,
        optimiser=megatron.adam(7, tensor=form != "flat"),
        args={"consumed_train_samples": 24, "bf16": True},
    )
    with MegatronImport(source, LLAMA_SHAPE) as opened:
        assert (opened.step, opened.updates, opened.samples, opened.tokens) == (3, 7, 24, 288)
        assert opened.optimiser is not None
        settings = opened.optimiser
        assert (settings.lr, settings.betas, settings.weight_decay) == (1e-2, (0.9, 0.95), 0.1)
        path = opened.write(tmp_path / "run")
    alone = megatron.write(tmp_path / "alone", LLAMA_SHAPE, exact)
    model, _ = read_whole(imported(alone, tmp_path / "plain", LLAMA_SHAPE))
    tensors, loaded = read_whole(path, "")
    assert (loaded.step, loaded.meta["updates"], loaded.meta["samples"]) == (3, 7, 24)
    for name, tensor in model.items():
        assert torch.equal(tensors[f"model.{name}"], tensor)
    for moment in MOMENTS:
        there = megatron.write(tmp_path / moment, LLAMA_SHAPE, states[moment])
        state_of_weights, _ = read_whole(imported(there, tmp_path / f"of-{moment}", LLAMA_SHAPE))
        assert all(
            torch.equal(tensors[f"optim.{moment}.{name}"], tensor)
            for name, tensor in state_of_weights.items()
        )
    assert tensors.keys() == {
        f"{p}.{name}" for p in ("model", *(f"optim.{m}" for m in MOMENTS)) for name in model
    }


def test_only_weights(tmp_path: Path) -> None:
    """The weights in 16 bits are those of the run that begins, and no optimiser is read."""
    native = megatron.weights(GPT)
    states = random_states(native, *MOMENTS)
    source = megatron.write(tmp_path / "there", GPT, native, states=states, optimiser=megatron.adam(3))
    path = imported(source, tmp_path / "run", GPT, states=False)
    tensors, loaded = read_whole(path, "")
    assert path.name == "step-00000000"
    assert loaded.meta.keys() == {"model", "imported"}
    assert not any(name.startswith("optim.") for name in tensors)


@pytest.mark.parametrize("layout", ["layout.tp=2", "layout.dp=1"])
def test_training_goes_on_as_it_would_have_there(tmp_path: Path, layout: str) -> None:
    """A step here after the import gives the same weights and states as a plain step of AdamW there."""
    fixed = ("optim.clip=null", "optim.betas=[0.9, 0.95]", "optim.rate={schedule: constant}")
    settings = (layout, *fixed, "run.name=on", "train.steps=4")
    config = job(tmp_path, *settings, model=LLAMA)
    shape, rate = config.shape(), config.optim.lr
    native = {name: tensor.requires_grad_() for name, tensor in megatron.weights(shape).items()}
    matrices = [t for t in native.values() if t.dim() > 1]
    groups = [
        {"params": matrices, "weight_decay": config.optim.weight_decay},
        {"params": [t for t in native.values() if t.dim() == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=config.optim.eps)
    for seed in range(3):
        tokens = torch.randint(0, shape.vocab, (2, 9), generator=torch.Generator().manual_seed(seed))
        _step(shape, native, adamw, (tokens[:, :-1], tokens[:, 1:]))
    there = _written(tmp_path / "there", shape, native, adamw, 3)
    run = imported(there, tmp_path / "imported", shape)
    config = job(tmp_path, *settings, f"checkpoint.resume={run}", model=LLAMA)
    assert train(config)["step"] == 4
    _step(shape, native, adamw, _first_batch(config))
    imported(_written(tmp_path / "after", shape, native, adamw, 4), tmp_path / "next", shape)
    stretto_tensors, megatron_tensors = (
        tensors(config, 4),
        read_whole(tmp_path / "next/checkpoints/step-00000004", "")[0],
    )
    before = read_whole(run, "")[0]
    assert stretto_tensors.keys() == megatron_tensors.keys()
    for name, tensor in stretto_tensors.items():
        moved = (megatron_tensors[name] - before[name]).abs().max()
        assert (tensor - megatron_tensors[name]).abs().max() < 1e-3 * moved, name


def _step(
    shape: ModelShape, native: megatron.Tensors, adamw: torch.optim.AdamW, batch: tuple[Tensor, Tensor]
) -> None:
    logits = megatron.forward(shape, native, batch[0])
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten()).backward()
    adamw.step()
    adamw.zero_grad()


def _written(
    folder: Path, shape: ModelShape, native: megatron.Tensors, adamw: torch.optim.AdamW, step: int
) -> Path:
    states = {m: {n: adamw.state[t][m] for n, t in native.items()} for m in MOMENTS}
    plain = {name: tensor.detach() for name, tensor in native.items()}
    optimiser = megatron.adam(step)
    return megatron.write(folder, shape, plain, states=states, optimiser=optimiser, iteration=step)


def _first_batch(config: TrainConfig) -> tuple[Tensor, Tensor]:
    folder = open_tokens(config)
    assert isinstance(folder, TokenFolder)
    samples = WindowSamples(folder, "train", config.data.sequence, config.train.seed, ratio=config.data.split)
    batch = samples.batch(range(config.batch.global_size))
    return batch.inputs, batch.targets


# ------------------------------------------------------------------ what is refused


class Payload:
    """An object whose unpickling makes a folder."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_nothing_in_common_is_run(tmp_path: Path) -> None:
    source = megatron.write(tmp_path / "there", GPT, megatron.weights(GPT))
    common = source / "iter_0000003" / COMMON
    mark = tmp_path / "ran"
    torch.save({"args": Payload(mark), "iteration": 3}, common)
    with pytest.raises(StrettoError, match=r"it names '\w+\.mkdir', which could run code"):
        read_common(common.parent)
    # what may occur is noted, and not called either
    torch.save({"args": torch.nn.Linear(1, 1), "iteration": 3}, common)
    assert read_common(common.parent).args == {}
    assert not mark.exists()


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    source = megatron.write(tmp_path / "there", GPT, megatron.weights(GPT))
    folder = source / "iter_0000003"
    cases: list[tuple[str, str]] = [
        ("latest", "names iter_0000009, which is not there"),
        ("legacy", "old format, a file mp_rank_"),
        ("zarr", "is of the format 'zarr'"),
        ("kind", "has no metadata.json"),
        ("common", "has no common.pt"),
        ("index", ".metadata cannot be read"),
        ("truncated", "should be bytes"),
    ]
    for case, message in cases:
        place = _broken(folder, tmp_path / case, case)
        with pytest.raises(StrettoError, match=message):
            imported(place, tmp_path / "run", GPT)
    assert not (tmp_path / "run").exists()


def _broken(folder: Path, copy: Path, case: str) -> Path:
    """A copy of a checkpoint that is damaged in one way."""
    place = copy / folder.name
    place.mkdir(parents=True)
    for file in folder.iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    if case == "latest":
        (copy / "latest_checkpointed_iteration.txt").write_text("9", encoding="utf-8")
        return copy
    if case == "legacy":
        (place / "mp_rank_00").mkdir()
    elif case == "zarr":
        (place / "metadata.json").write_text('{"sharded_backend": "zarr"}', encoding="utf-8")
    elif case == "truncated":
        data = place / "__0_0.distcp"
        data.write_bytes(data.read_bytes()[:-100])
    else:
        names = {"kind": "metadata.json", "common": COMMON, "index": ".metadata"}
        (place / names[case]).unlink()
    return place


def test_a_changed_value_in_a_stacked_tensor_is_found(tmp_path: Path) -> None:
    """Only parts of a stacked tensor are read at a time, and yet all of it is compared."""
    native = megatron.weights(GPT)
    source = megatron.write(tmp_path / "there", GPT, native)
    data = source / "iter_0000003" / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    layer = native["decoder.layers.1.self_attention.linear_proj.weight"].numpy().tobytes()
    content[content.index(layer) + 9] ^= 1
    data.write_bytes(content)
    with pytest.raises(StrettoError, match=r"linear_proj\.weight, at byte .* Bad CRC-32"):
        imported(source, tmp_path / "run", GPT)


def test_another_model_is_refused(tmp_path: Path) -> None:
    native = megatron.weights(LLAMA_SHAPE)
    source = megatron.write(tmp_path / "there", LLAMA_SHAPE, native)
    for shape, message in (
        (replace(LLAMA_SHAPE, ffn=32), r"linear_fc1.weight has shape \[2, 48, 16\] .* but \[2, 64, 16\]"),
        (replace(LLAMA_SHAPE, layers=3), r"layer_norm_weight has shape \[2, 16\] .* but \[3, 16\]"),
        (replace(LLAMA_SHAPE, tied=True, kv_heads=4), "has shape"),
        (replace(GPT, ffn=24), "has no tensor embedding.position_embeddings.weight"),
    ):
        with pytest.raises(StrettoError, match=message):
            MegatronImport(source, shape)
    more = {**native, "decoder.extra.weight": torch.ones(3)}
    source = megatron.write(tmp_path / "more", LLAMA_SHAPE, more)
    with pytest.raises(StrettoError, match=r"decoder\.extra\.weight .* has no place in the model"):
        MegatronImport(source, LLAMA_SHAPE)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"rotary_percent": 0.5}, "rotary_percent is 0.5"),
        ({"apply_layernorm_1p": True, "normalization": "LayerNorm"}, "apply_layernorm_1p"),
        ({"num_layers": None}, "does not say which model it is of: it lacks num_layers"),
    ],
)
def test_arguments_that_say_another_model(more: dict[str, Any], message: str) -> None:
    args = {**vars(megatron.arguments(LLAMA_SHAPE)), **more}
    with pytest.raises(StrettoError, match=message):
        read_saved(args, "common.pt")


def test_the_arguments_of_a_run() -> None:
    more: dict[str, Any] = {
        "lr": 3e-4,
        "min_lr": 3e-5,
        "lr_decay_style": "cosine",
        "lr_decay_iters": 900,
        "lr_warmup_iters": 20,
        "train_iters": 1000,
        "weight_decay": 0.1,
        "clip_grad": 1.0,
        "global_batch_size": 64,
        "micro_batch_size": 4,
        "bf16": True,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_eps": 1e-8,
    }
    args = {**vars(megatron.arguments(LLAMA_SHAPE)), **more}
    changes = read_saved(args, "common.pt").changes
    assert changes["batch"] == {"global_size": 64, "micro_size": 4}
    assert changes["train"] == {"steps": 1000, "dtype": "bfloat16"}
    assert changes["optim"]["lr"] == 3e-4
    rate = changes["optim"]["rate"]
    assert (rate["schedule"], rate["warmup"], rate["decay_steps"]) == ("cosine", 20, 900)
    assert rate["min_ratio"] == pytest.approx(0.1)


def test_text_and_tokenizer_are_taken_where_they_are_here(tmp_path: Path) -> None:
    for name in ("text_document.bin", "text_document.idx", "vocab.json", "merges.txt"):
        (tmp_path / name).touch()
    files = {"vocab_file": str(tmp_path / "vocab.json"), "merge_file": str(tmp_path / "merges.txt")}
    more: dict[str, Any] = {"tokenizer_type": "GPT2BPETokenizer", "split": "949,50,1", **files}
    args = {**vars(megatron.arguments(GPT)), **more, "data_path": [str(tmp_path / "text_document")]}
    saved = read_saved(args, "common.pt")
    wanted = {"source": args["data_path"][0], "tokenizer": files["vocab_file"], "split": "949,50,1"}
    assert (saved.changes["data"], saved.notes) == ({**wanted, "sequence": GPT.sequence}, [])
    saved = read_saved({**args, "data_path": ["0.5", "/there/a", "0.5", "/there/b"]}, "common.pt")
    assert "source" not in saved.changes["data"]
    assert saved.notes == ["name data.source: /there/a, /there/b, which it was there, is not on this machine"]
    unread = read_saved({**args, "tokenizer_type": "BertWordPieceCase"}, "common.pt")
    assert "tokenizer" not in unread.changes["data"]
    assert "such a tokenizer is not read here" in unread.notes[0]
