"""Generation on tensor-parallel ranks: the logits and the texts of one process, for every kind of model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from chats import tokenizer_folder
from ranks import on_ranks
from stretto.cli.main import run
from stretto.engine.checkpoint.index import MODEL
from stretto.engine.checkpoint.save import save
from stretto.engine.models import build
from stretto.engine.models.cache import KeyValueCache, cacheable
from stretto.engine.models.generate import stream
from stretto.engine.parallel.fragment import ShardPlacement
from stretto.engine.parallel.mesh import Mesh
from stretto.errors import StrettoError
from stretto.job.attention import AttentionShape, LatentShape, RopeScaling
from stretto.job.experts import ExpertShape
from stretto.job.lora import LoraShape
from stretto.job.shape import ModelShape, shape_to_record
from stretto.layout.layout import Layout
from stretto.run.config.schema import LoopConfig
from stretto.run.generate.job import GenerationJob, generate_rank, run_generation
from stretto.run.generate.text import Sampling, Wording, Writer, load_model
from stretto.run.launch.local import RankFailed, run_ranks
from tiny_job import LLAMA, MOE, job
from train_runs import train

VOCAB = 341  # the tokenizer's and one more, odd: the last rank's share is padded
BASE = ModelShape(family="llama", layers=2, hidden=32, heads=4, kv_heads=2, ffn=40, vocab=VOCAB, sequence=22)
LATENT = LatentShape(kv_rank=12, rope_dim=4, value_dim=6, q_rank=10)
SHAPES = {
    "llama": BASE,
    "one key head": replace(BASE, kv_heads=1, tied=True),
    "gpt": ModelShape(family="gpt", layers=2, hidden=32, heads=4, vocab=VOCAB, sequence=22, dropout=0.1),
    "experts": replace(BASE, moe=ExpertShape(experts=4, shared_ffn=8, capacity=1.0)),
    "latent": replace(
        BASE, kv_heads=4, attention=AttentionShape(latent=LATENT), moe=ExpertShape(experts=4, shared_ffn=8)
    ),
    "gemma": replace(
        BASE,
        norm="rms1p",
        block_norms="sandwich",
        embedding_scale=32**0.5,
        logit_softcap=3.0,
        attention=AttentionShape(window=5, full_every=2, softcap=2.0, norm="head"),
    ),
    "windows and sinks": replace(BASE, attention=AttentionShape(window=5, full_every=2, sinks=True)),
    "dynamic": replace(BASE, rope=RopeScaling(type="dynamic", factor=2.0, original_positions=16)),
    "adapters": replace(BASE, lora=LoraShape(rank=2, alpha=4, dropout=0.1)),
}
PROMPTS = ["a few words", "others!"]
GREEDY, SAMPLED = Sampling(tokens=6, temperature=0.0), Sampling(tokens=6, top_p=0.9, seed=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of every kind of model, all weights random, with a tokenizer."""
    folder = tmp_path_factory.mktemp("ranks")
    tokenizer_folder(folder, "llama3")
    for name, shape in SHAPES.items():
        model, draw = build(shape), torch.Generator().manual_seed(3)
        tensors = dict[str, tuple[Tensor, ShardPlacement]]()
        for key, weight in model.named_parameters():
            values = torch.empty(weight.shape).normal_(std=0.2, generator=draw)
            tensors[MODEL + key] = (values, ShardPlacement.unsharded(key, tuple(weight.shape)))
        save(folder / name, 1, tensors, {"model": shape_to_record(shape)})
    return folder


@dataclass(frozen=True, kw_only=True)
class Result:
    logits: Tensor
    tokens: list[Tensor]
    texts: list[Any]
    caches: list[tuple[int, ...]]
    parameters: int


def results(folder: Path, names: list[str], mesh: Mesh | None) -> list[Result]:
    return [result(folder / name / "step-00000001", mesh) for name in names]


@torch.no_grad()
def result(checkpoint: Path, mesh: Mesh | None) -> Result:
    """Logits and tokens in float64, texts in float32."""
    model = load_model(checkpoint, mesh=mesh, dtype=torch.float64)
    ids = torch.randint(0, model.shape.vocab, (3, 20), generator=torch.Generator().manual_seed(1))
    group = None if mesh is None else mesh.group("tp")
    tokens = [
        torch.stack(list(stream(model, ids[:, :14], 10, at, generator=_generators(), group=group, top_p=0.9)))
        for at in (0.0, 1.0)
    ]  # beyond the positions of the model too
    cache = KeyValueCache(model)
    forward, cuts = (cache.forward, [7, 1, 4, 8]) if cacheable(model.shape) else (model, [20])
    logits = torch.cat([forward(part) for part in ids.split(cuts, dim=1)], dim=1)
    writer = Writer.load(checkpoint, Wording.load(checkpoint), mesh=mesh)
    prompts = [writer.wording.prompt(text) for text in PROMPTS]
    return Result(
        logits=logits,
        tokens=tokens,
        texts=[writer.write(prompts, sampling) for sampling in (GREEDY, SAMPLED)],
        caches=[tuple(layer._keys.shape) for layer in cache._caches],
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def _generators() -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in (1, 2, 3)]


def on_rank(folder: Path, names: list[str]) -> list[Result]:
    mesh = Mesh(Layout(tp=dist.get_world_size()))
    both = results(folder, names, mesh)
    mesh.close()
    return both


FEW = ["one key head", "gpt", "latent", "gemma", "dynamic"]


@pytest.mark.parametrize(
    ("tp", "names"),
    [
        pytest.param(2, FEW[:2], id="tp2"),
        pytest.param(
            2, [name for name in SHAPES if name not in FEW[:2]], id="tp2 more", marks=pytest.mark.slow
        ),
        pytest.param(4, ["one key head"], id="tp4", marks=pytest.mark.slow),
        pytest.param(4, ["latent"], id="tp4 more", marks=pytest.mark.slow),
    ],
)
def test_logits_and_texts_are_those_of_one_process(folder: Path, tp: int, names: list[str]) -> None:
    ranks = on_ranks(tp, on_rank, folder, names)
    for at, (name, plain) in enumerate(zip(names, results(folder, names, None), strict=True)):
        scale = plain.logits.abs().max()
        assert len({text.text for texts in plain.texts for text in texts}) > 2, name
        for rank in ranks:
            split = rank[at]
            assert float((split.logits - plain.logits).abs().max() / scale) < 1e-13, name
            assert torch.equal(split.logits, ranks[0][at].logits), name
            assert all(torch.equal(*pair) for pair in zip(split.tokens, plain.tokens, strict=True)), name
            assert split.texts == plain.texts, name
            heads = SHAPES[name].kv_heads
            if cacheable(SHAPES[name]):
                assert {cache[1] for cache in split.caches} == {max(1, heads // tp)}, "each its heads"
            assert split.parameters < plain.parameters / tp * 1.6, "no rank has the whole model"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that other layouts trained."""
    folder = tmp_path_factory.mktemp("runs")
    for name, model, *layout in (
        ("zero3", LLAMA, "layout.dp=2", "dp.mode=zero3"),
        ("moe", MOE, "layout.pp=2"),
    ):
        train(job(folder, *layout, "train.steps=3", f"run.name={name}", model=model))
    return folder / "runs"


def written(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert run(["generate", *map(str, arguments)]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", ["zero3", "moe"])
def test_the_command_writes_the_same_texts(runs: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    several = [runs / name, "--prompt", "a ", "--prompt", "bb", "--tokens", 24, "--json"]
    plain = json.loads(written(capsys, *several))
    assert len(plain["outputs"][0]["text"]) > 12
    assert json.loads(written(capsys, *several, "--tp", 2)) == plain


@pytest.mark.slow
@pytest.mark.parametrize("start", ["--tp", "torchrun"])
def test_one_text_is_streamed_and_ranks_end_together(
    runs: Path, start: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(runs / "zero3"), "--prompt", "a ", "--tokens", "16"]
    stop = ("--stop", written(capsys, *arguments)[8:10])
    torchrun = ["torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m"]
    options = ["--tp", "2"] if start == "--tp" else []  # torchrun's ranks take all processes
    module = [*([] if options else torchrun), "stretto.cli.main"]
    done = subprocess.run(
        [sys.executable, "-m", *module, "generate", *arguments, *stop, *options],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == written(capsys, *arguments, *stop)
    assert 2 < len(done.stdout) < 12


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--tp", "3"), ("--tp 3: it must divide model.heads, which is 4", "nearest: --tp 2 or 4")),
        (("--tp", "2", "--top-p", "1.5"), ("--top-p is 1.5, must be above 0",)),
        (("--tp", "2", "--device", "cuda"), ("there is no such device here: torch sees cpu",)),
        (("--tp", "2", "--checkpoint", "9"), ("--checkpoint 9: ", "it has 3")),
    ],
)
def test_errors_come_before_any_process(
    runs: Path,
    arguments: tuple[str, ...],
    says: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr("stretto.run.train.launch.run_ranks", None)
    assert run(["generate", str(runs / "zero3"), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert all(phrase in captured.err for phrase in says), captured.err


def dies_later(request: GenerationJob) -> dict[str, Any]:
    if os.environ["RANK"] == "1":
        counted = iter(range(5))
        KeyValueCache.forward, plain = (  # type: ignore[method-assign]
            lambda *a: plain(*a) if next(counted, None) is not None else os.kill(os.getpid(), signal.SIGKILL),
            KeyValueCache.forward,
        )
    return generate_rank(request)


def test_a_rank_that_dies_ends_the_job(folder: Path) -> None:
    checkpoint = folder / "llama" / "step-00000001"
    prompt = Wording.load(checkpoint).prompt("a few")
    request = GenerationJob(
        checkpoint=checkpoint, prompts=[prompt], sampling=GREEDY, tp=2, train=LoopConfig(device="cpu")
    )
    with pytest.raises(RankFailed, match=r"rank 1 failed: was killed by SIGKILL"):
        run_ranks(2, dies_later, request)
    assert run_generation(request).outcome is not None


def test_a_token_that_the_model_lacks_is_refused(folder: Path) -> None:
    checkpoint = folder / "llama" / "step-00000001"
    prompt = replace(Wording.load(checkpoint).prompt("a few"), ids=[3, 10**6])
    request = GenerationJob(
        checkpoint=checkpoint, prompts=[prompt], sampling=GREEDY, tp=2, train=LoopConfig(device="cpu")
    )
    with pytest.raises(StrettoError, match="token 1000000 is outside the model's vocabulary"):
        run_generation(request)
