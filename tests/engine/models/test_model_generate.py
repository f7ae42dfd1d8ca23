from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from model_shapes import SHAPES
from torch import Tensor

from stretto.engine.models import LanguageModel, build, initialise
from stretto.engine.models.generate import sample, stream
from stretto.errors import StrettoError


@pytest.fixture(scope="module", params=["gpt", "llama-grouped"])
def model(request: pytest.FixtureRequest) -> LanguageModel:
    built = build(SHAPES[request.param])
    initialise(built, 0)
    return built


PROMPT = torch.tensor([[1, 2, 3], [9, 8, 7]])


def generate(model: LanguageModel, ids: Tensor, tokens: int, **options: Any) -> Tensor:
    """Prompts with what follows them."""
    return torch.cat([ids, *(token[:, None] for token in stream(model, ids, tokens, **options))], dim=1)


def test_temperature_0_takes_the_likeliest_token(model: LanguageModel):
    want = PROMPT
    for _ in range(5):
        want = torch.cat([want, model(want)[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(generate(model, PROMPT, 5, temperature=0.0), want)


def test_the_model_sees_all_until_the_window_is_full_then_the_last(model: LanguageModel):
    seen: list[Tensor] = []
    handle = model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    length = model.shape.sequence
    out = generate(model, PROMPT, length + 5, cache=False)
    handle.remove()
    assert out.shape == (2, 3 + length + 5)
    for end, window in zip(range(3, 3 + length + 5), seen, strict=True):
        assert torch.equal(window, out[:, max(0, end - length) : end])


def test_a_seed_gives_the_same_text_and_another_seed_another(model: LanguageModel):
    def text(seed: int) -> Tensor:
        return generate(model, PROMPT, 12, generator=torch.Generator().manual_seed(seed))

    assert torch.equal(text(1), text(1))
    assert not torch.equal(text(1), text(2))


def test_the_stream_samples_lazily(model: LanguageModel):
    calls: list[int] = []
    handle = model.register_forward_hook(lambda *_: calls.append(1))
    tokens = stream(model, PROMPT, 100)
    assert not calls
    next(tokens)
    assert len(calls) == 1
    handle.remove()


def test_each_row_stops_at_its_stop_token(model: LanguageModel):
    free = generate(model, PROMPT, 8, temperature=0.0)[:, 3:]
    stop = int(free[0, 2])
    stopped = generate(model, PROMPT, 8, temperature=0.0, stop=stop)[:, 3:]
    for row, unstopped in zip(stopped.tolist(), free.tolist(), strict=True):
        end = unstopped.index(stop) + 1 if stop in unstopped else len(unstopped)
        assert row[:end] == unstopped[:end]
        assert set(row[end:]) <= {stop}
    alone = generate(model, PROMPT[:1], 8, temperature=0.0, stop=stop)
    assert alone[0, 3:].tolist() == free[0, : free[0].tolist().index(stop) + 1].tolist()


def test_no_new_tokens_returns_the_prompt(model: LanguageModel):
    assert torch.equal(generate(model, PROMPT, 0), PROMPT)


def test_generation_restores_the_training_mode_and_turns_dropout_off():
    model = build(replace(SHAPES["gpt"], dropout=0.5))
    initialise(model, 0)
    for training in (True, False):
        model.train(training)
        texts = [generate(model, PROMPT, 8, temperature=0.0) for _ in range(2)]
        assert torch.equal(*texts)
        assert model.training is training
        assert model.embed.training is training


def test_samples_follow_the_probabilities():
    logits = torch.tensor([2.0, 0.0, 1.0, -1.0]).repeat(20000, 1)
    generator = torch.Generator().manual_seed(0)

    def shares(temperature: float, top_k: int | None) -> Tensor:
        return sample(logits, temperature, top_k, generator).bincount(minlength=4) / len(logits)

    torch.testing.assert_close(shares(1.0, None), logits[0].softmax(-1), rtol=0, atol=0.015)
    torch.testing.assert_close(shares(0.5, None), (logits[0] * 2).softmax(-1), rtol=0, atol=0.015)
    two = torch.tensor([2.0, -torch.inf, 1.0, -torch.inf]).softmax(-1)
    torch.testing.assert_close(shares(1.0, 2), two, rtol=0, atol=0.015)
    assert shares(1.0, 1).tolist() == [1, 0, 0, 0]
    torch.testing.assert_close(shares(1.0, 9), logits[0].softmax(-1), rtol=0, atol=0.015)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ids": torch.zeros(1, 0, dtype=torch.int64)}, "prompt of"),
        ({"ids": torch.zeros(3, dtype=torch.int64)}, "prompt of"),
        ({"ids": torch.tensor([[5000]])}, "token 5000"),
        ({"ids": torch.tensor([[-1]])}, "token -1"),
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": 0}, "top_k is 0"),
        ({"max_new_tokens": -1}, "max_new_tokens -1"),
    ],
)
def test_bad_arguments_are_named_before_the_first_token(change: dict[str, Any], says: str):
    arguments: dict[str, Any] = {"ids": PROMPT, "max_new_tokens": 3} | change
    with pytest.raises(StrettoError, match=says):
        stream(build(SHAPES["gpt"]), **arguments)
