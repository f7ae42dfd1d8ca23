"""Models with an encoder equal T5 and BART in `transformers`: logits, loss, every gradient, and files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import BartConfig, BartForConditionalGeneration, T5Config, T5ForConditionalGeneration
from transformers.models.bart import modeling_bart
from transformers.models.t5 import modeling_t5

from double_precision import in_float64
from stretto.engine.checkpoint.huggingface.exporting import export_huggingface
from stretto.engine.checkpoint.huggingface.importing import import_huggingface
from stretto.engine.models import LanguageModel, build
from stretto.engine.models.attention import distance_buckets
from stretto.engine.models.huggingface import from_huggingface, to_huggingface
from stretto.errors import StrettoError
from stretto.job.attention import AttentionShape
from stretto.job.huggingface import config_to_huggingface, read_config
from stretto.job.parameters import count_parameters, parameter_shapes
from stretto.job.presets import preset
from stretto.job.shape import ModelShape, shape_from_record, shape_to_record
from stretto_interop.checkpoints.dcp.titan import rules as titan_rules
from stretto_interop.checkpoints.megatron.names import rules as megatron_rules

_T5: dict[str, Any] = {
    "vocab_size": 67,
    "d_model": 24,
    "d_kv": 10,
    "d_ff": 40,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 9,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
_BART: dict[str, Any] = {
    "vocab_size": 67,
    "max_position_embeddings": 32,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
    "dropout": 0.0,
    "init_std": 0.2,
    "scale_embedding": True,
}
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "t5": (T5Config, T5ForConditionalGeneration, _T5),
    "t5 version 1.1": (
        T5Config,
        T5ForConditionalGeneration,
        {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "bart": (BartConfig, BartForConditionalGeneration, _BART),
}
LENGTHS = torch.tensor([12, 7, 1])  # of 12 tokens that the encoder reads; the decoder reads 9


def _transformers_model(name: str, dtype: torch.dtype) -> Any:
    """Their model with a weight for everything, norms and biases too."""
    config, model, values = CASES[name]
    torch.manual_seed(3)
    built = model(config(**values))
    if "1.1" in name:  # transformers 5 ties what published files have apart
        built.lm_head.weight = nn.Parameter(torch.randn_like(built.lm_head.weight) * 0.1)
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.dim() == 1:
                parameter += torch.randn_like(parameter) * 0.1
    return built.to(dtype)


def _described(transformers_model: Any, name: str) -> ModelShape:
    untied = {"tie_word_embeddings": False} if "1.1" in name else {}
    return read_config({**transformers_model.config.to_dict(), **untied}).shape


def _weights(transformers_model: Any) -> dict[str, Tensor]:
    return dict(transformers_model.state_dict(keep_vars=True))


def _build(transformers_model: Any, name: str) -> LanguageModel:
    shape = _described(transformers_model, name)
    model = build(shape).to(next(transformers_model.parameters()).dtype)
    model.load_state_dict(
        {key: w.detach() for key, w in from_huggingface(_weights(transformers_model), shape).items()},
        strict=False,
    )
    model.tie()
    return model


def _samples() -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(5)
    ids = torch.randint(2, 67, (3, 12), generator=draw)
    decoder = torch.randint(2, 67, (3, 9), generator=draw)
    targets = torch.randint(2, 67, (3, 9), generator=draw)
    targets[1, 4:] = -100
    return ids, decoder, targets


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("name", CASES)
def test_logits_loss_and_every_gradient_equal_transformers(
    name: str, dtype: torch.dtype, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype == torch.float64:
        in_float64(monkeypatch, modeling_t5, modeling_bart)
    transformers_model = _transformers_model(name, dtype)
    stretto_model = _build(transformers_model, name)
    ids, decoder, targets = _samples()
    mask = (torch.arange(12) < LENGTHS.unsqueeze(1)).long()
    out = transformers_model(input_ids=ids, attention_mask=mask, decoder_input_ids=decoder, labels=targets)
    logits = stretto_model(ids, decoder=decoder, lengths=LENGTHS)
    assert _difference(logits, out.logits) < bound
    loss = stretto_model.loss(logits, targets) / (targets != -100).sum()
    assert _difference(loss, out.loss) < bound
    loss.backward()
    out.loss.backward()
    gradients = {
        key: torch.zeros_like(w) if w.grad is None else w.grad
        for key, w in _weights(transformers_model).items()
    }
    expected = from_huggingface(gradients, stretto_model.shape)
    named = dict(stretto_model.named_parameters())
    assert named.keys() == expected.keys()
    for key, parameter in named.items():
        assert parameter.grad is not None, key
        # of keys the bias has no gradient but rounding
        scale = max(float(expected[key].abs().max()), 1e-3)
        assert float((parameter.grad - expected[key]).abs().max()) / scale < 3 * bound, key
    counted = sum(p.numel() for p in {id(p): p for p in transformers_model.parameters()}.values())
    unused = 2 * 2 * 24 if name == "bart" else 0  # rows of positions before the first
    assert (
        count_parameters(stretto_model.shape).total
        == sum(p.numel() for p in named.values())
        == counted - unused
    )


def _difference(computed: Tensor, reference: Tensor) -> float:
    return float((computed.detach() - reference.detach()).abs().max() / reference.detach().abs().max())


def test_padding_is_not_seen() -> None:
    """Other tokens after the real ones change nothing, and other real ones do."""
    model = _build(_transformers_model("t5", torch.float64), "t5")
    ids, decoder, _ = _samples()
    plain = model(ids, decoder=decoder, lengths=LENGTHS)
    for at, same in ((7, True), (6, False)):
        other = ids.clone()
        other[1, at] = (ids[1, at] + 1) % 67
        changed = model(other, decoder=decoder, lengths=LENGTHS)
        assert torch.equal(changed[[0, 2]], plain[[0, 2]])
        assert torch.allclose(changed[1], plain[1], rtol=0, atol=1e-12) == same


@pytest.mark.parametrize("name", CASES)
def test_stored_probabilities_give_the_same(name: str) -> None:
    from stretto.engine.models.causal import choose_kernel

    model = _build(_transformers_model(name, torch.float64), name)
    ids, decoder, _ = _samples()
    plain = model(ids, decoder=decoder, lengths=LENGTHS)
    choose_kernel(model, "explicit")
    assert _difference(model(ids, decoder=decoder, lengths=LENGTHS), plain) < 1e-12


@pytest.mark.parametrize("causal", [True, False])
def test_buckets_of_distances(causal: bool) -> None:
    """By hand: 8 buckets to distance 16. Causal: 0 to 3 apart, then 4 to 5, 6 to 7, 8 to 11, and 12 on.
    Otherwise 4 on each side: 0 and 1 apart, 2 to 5, and 6 on.
    """
    buckets = distance_buckets(20, torch.device("cpu"), causal=causal, buckets=8, max_distance=16)
    behind = buckets[-1].flip(0).tolist()  # keys at distances 0, 1, ... before the last query
    ahead = buckets[0].tolist()
    if causal:
        assert behind[:6] == [0, 1, 2, 3, 4, 4]
        assert behind[15:] == [7] * 5
        assert set(ahead) == {0}
    else:
        assert behind[:2] == [0, 1]
        assert behind[15:] == [3] * 5
        assert ahead[1:] == [4 + bucket for bucket in behind[1:]]
    assert behind == sorted(behind)


@pytest.mark.parametrize("name", ["t5-small", "t5-v1.1-base", "bart-large"])
def test_presets_have_the_published_sizes(name: str) -> None:
    """60,506,624 of t5-small (Raffel et al. 2020: about 60 million), 247,577,856 of t5-v1_1-base, and of
    bart-large 406,291,456 without the four rows of positions that none has.
    """
    published = {"t5-small": 60506624, "t5-v1.1-base": 247577856, "bart-large": 406291456 - 4 * 1024}
    shape = preset(name)
    assert count_parameters(shape).total == published[name]
    with torch.device("meta"):
        named = {key: tuple(p.shape) for key, p in build(shape).named_parameters()}
    assert named == parameter_shapes(shape)
    assert list(named) == list(parameter_shapes(shape))
    assert shape_from_record(json.loads(json.dumps(shape_to_record(shape)))) == shape
    assert read_config(config_to_huggingface(shape)).unknown == ()


@pytest.mark.parametrize("name", CASES)
def test_a_folder_goes_in_and_out(name: str, tmp_path: Path) -> None:
    transformers_model = _transformers_model(name, torch.float32)
    folder, run, out = tmp_path / "in", tmp_path / "run", tmp_path / "out"
    folder.mkdir()
    values = transformers_model.config.to_dict()
    if "1.1" in name:
        values["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(values))
    tensors = {key: w.detach().clone() for key, w in _weights(transformers_model).items()}
    save_file(tensors, folder / "model.safetensors")
    step = import_huggingface(folder, run)
    export_huggingface(step, out)
    written = load_file(out / "model.safetensors")
    for key, w in written.items():
        if key.endswith("embed_positions.weight"):
            assert torch.equal(w[2:], tensors[key][2:])
        else:
            assert torch.equal(w, tensors[key]), key
    _, model, _ = CASES[name]
    back = model.from_pretrained(out)
    ids, decoder, targets = _samples()
    want = transformers_model.eval()(input_ids=ids, decoder_input_ids=decoder).logits
    assert torch.allclose(back.eval()(input_ids=ids, decoder_input_ids=decoder).logits, want, atol=1e-6)
    assert float(back(input_ids=ids, labels=targets).loss) > 0  # it has a token to begin with
    shape = _described(transformers_model, name)
    again = from_huggingface(to_huggingface(from_huggingface(tensors, shape), shape), shape)
    assert all(torch.equal(again[key], w) for key, w in from_huggingface(tensors, shape).items())


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"encoder_layers": 0}, "relative positions without an encoder"),
        ({"position_embedding": "rotary"}, "rotary positions in an encoder"),
        ({"attention": AttentionShape(window=4)}, "attention windows with an encoder"),
    ],
)
def test_what_is_not_built_is_said(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(StrettoError, match=says):
        build(replace(preset("t5-small"), **changed))


@pytest.mark.parametrize("name", ["t5-small", "bart-base"])
def test_other_frameworks_have_no_such_model(name: str) -> None:
    for rules in (megatron_rules, titan_rules):
        with pytest.raises(StrettoError, match="encoder_layers"):
            list(rules(preset(name)))


def test_a_decoder_without_tokens_is_an_error() -> None:
    shape = ModelShape(family="t5", layers=1, hidden=8, heads=2, vocab=16, sequence=8)
    with pytest.raises(StrettoError, match="the decoder has no tokens"):
        build(shape)(torch.zeros(1, 4, dtype=torch.int64))
