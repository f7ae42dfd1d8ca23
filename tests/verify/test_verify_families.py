"""Layouts of small models of the published families equal one process; those with routers and latent
attention are in test_verify_routers.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from pages import run_here
from proofs import verify
from stretto.job.huggingface import shape_from_huggingface
from stretto.run.config.written import model_section
from tiny_job import Changes, changes, job, varied

pytestmark = pytest.mark.apart

_SIZES = "layers: 2, hidden: 16, heads: 4, kv_heads: 2, head_dim: 6, ffn: 24"
_SCALED = "rope: {type: llama3, factor: 8, original_positions: 8}"
MODELS = {
    "llama": f"{{family: llama, {_SIZES}, {_SCALED}}}",
    "qwen2": f"{{family: qwen2, {_SIZES}, rope: {{type: dynamic, factor: 2, original_positions: 8}}}}",
    "qwen3": f"{{family: qwen3, {_SIZES}, tied: true}}",
    "gemma2": f"{{family: gemma2, {_SIZES}, attention: {{window: 5, query_scale: 4, softcap: 1}}}}",
    "gemma3": f"{{family: gemma3, {_SIZES}, attention: {{window: 5, full_every: 2, local_theta: 100}}}}",
}

# of the small models that are compared with `transformers`, which takes seconds to import
NAMES = (
    "gpt2",
    "llama",
    "llama, llama3 positions",
    "llama, linear positions",
    "llama, dynamic positions",
    "llama, yarn positions",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


TWO_RANKS = [
    changes(cp=2),
    changes(tp=2, sequence_parallel=True),
    changes(cp=2, context="ulysses"),
]
LAYOUTS = [
    changes(tp=2, cp=2, sequence_parallel=True),
    changes(tp=2, pp=2, schedule="zb-h1", recompute="selective"),
    changes(dp=2, cp=2, context="ulysses", mode="zero3"),
]


@pytest.mark.parametrize(
    ("name", "cases"),
    [
        *(
            pytest.param(
                name, TWO_RANKS[at % 3 : at % 3 + 1], marks=[pytest.mark.slow] if name == "qwen3" else []
            )
            for at, name in enumerate(MODELS)
        ),
        *(pytest.param(name, LAYOUTS, marks=pytest.mark.slow) for name in MODELS),
    ],
    ids=[*MODELS, *(f"{name} in every layout" for name in MODELS)],
)
def test_layouts_equal_one_process(folder: Path, name: str, cases: list[Changes]) -> None:
    model = MODELS[name]
    config = job(folder, "data.sequence=15", "batch.global_size=4", model=model)
    for verdict in verify(config, [varied(config, case) for case in cases], steps=1):
        assert verdict.equal, verdict
        assert verdict["weights"].bound <= 1e-9


def families() -> Any:
    """The small models that are compared with `transformers`."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "engine" / "models"))
    import family_models

    return family_models


@pytest.mark.slow
def test_no_family_is_left_out() -> None:
    assert tuple(families().CASES) == NAMES


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", NAMES)
def test_every_layout_of_every_family_on_two_ranks(name: str, tmp_path: Path) -> None:
    shape = shape_from_huggingface(families().their_config(name).to_dict())
    text = tmp_path / "text.txt"
    config = job(tmp_path)  # writes the text
    values = {
        # beyond the positions of the first training, on which dynamic scaling depends
        "model": model_section(replace(shape, layers=4, vocab=300, sequence=max(shape.sequence, 24))),
        "data": {"source": str(text), "vocab": 300, "sequence": 24, "cache": config.data.cache},
        "batch": {"global_size": 8, "micro_size": 1},
        "train": {"steps": 2},
    }
    file = tmp_path / "family.yaml"
    file.write_text(yaml.safe_dump(values))
    printed = run_here(["stretto", "verify", str(file), "--layouts", "all", "--ranks", "2"], tmp_path)
    assert "all equal to one process" in printed
