"""The table of families in reference/models.md: what was compared with `transformers`, and how closely.

    python docs/_generators/models_table.py                     # print it
    python docs/_generators/models_table.py --write             # put it into models.md
    python docs/_generators/models_table.py --layouts 2         # prove every layout of each family (slow)

The small models are those of tests/engine/models/family_models.py, with everything special about a family
switched on; `transformers` and torch must be installed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml

from stretto.job.huggingface import shape_from_huggingface
from stretto.job.shape import ModelShape
from stretto.run.config.written import model_section

DOCS = Path(__file__).parents[1]
PAGE = DOCS / "reference" / "models.md"
START, END = "<!-- table of families: docs/_generators/models_table.py -->", "<!-- end of the table -->"
sys.path.insert(0, str(DOCS.parent / "tests" / "engine" / "models"))
families: Any = importlib.import_module("family_models")

# what the small model of each case has switched on
WITH = {
    "gpt2": "biases, learned positions, tied head",
    "llama": "grouped queries, wide heads, attention biases, tied head",
    "llama, llama3 positions": "positions beyond the original 16",
    "llama, linear positions": "positions beyond, MLP biases",
    "llama, dynamic positions": "positions beyond",
    "llama, yarn positions": "positions beyond",
    "mistral": "window of 7 of 24 positions",
    "mixtral": "5 experts, window",
    "qwen2": "biases of q, k, v; window; yarn positions",
    "qwen2_moe": "every second block with experts, a gated shared one",
    "qwen3": "q and k norms, biases, tied head",
    "qwen3_moe": "q and k norms, a leading dense block",
    "gemma2": "both soft-caps, alternating windows, four norms, scaled embedding",
    "gemma3_text": "two rotary bases, linear positions, alternating windows, q and k norms",
    "gpt_oss": "sinks, alternating windows, biased experts and router, yarn positions",
    "deepseek_v2": "latent attention, groups of experts, yarn positions with mscale",
    "deepseek_v3": "latent queries too, sigmoid router with corrections, groups, biases",
}


def shape_of(name: str) -> ModelShape:
    return shape_from_huggingface(families.their_config(name).to_dict())


def closeness(result: Any) -> str:
    return f"{max(result.logits, result.loss):.0e}, {result.gradients:.0e}"


def table() -> list[str]:
    """The table's lines."""
    lines = [
        "| model_type | with | logits and loss, gradients: float32 | the same: float64 | parameters |",
        "|---|---|---|---|---|",
    ]
    for name in families.CASES:
        single, double = (families.compare(name, dtype) for dtype in (torch.float32, torch.float64))
        assert single.parameters == single.transformers_parameters, name
        about = f"{closeness(single)} | {closeness(double)} | {single.parameters:,}, equal"
        kind, _, more = name.partition(", ")
        lines.append(f"| `{kind}`{f', {more}' if more else ''} | {WITH[name]} | {about} |")
    return lines


def config_of(shape: ModelShape) -> Mapping[str, Any]:
    """A config to prove layouts of a small shape with."""
    return {
        "model": model_section(replace(shape, layers=4, vocab=512)),
        "data": {"source": "python-stdlib", "sequence": 16, "vocab": 512},
        "batch": {"global_size": 8, "micro_size": 1},
        "train": {"steps": 2},
    }


def prove(name: str, ranks: int) -> str:
    """What `stretto verify --layouts all` says of a case."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(yaml.safe_dump(config_of(shape_of(name))), encoding="utf-8")
        command = [sys.executable, "-m", "stretto", "verify", str(path), "--layouts", "all", "--json"]
        done = subprocess.run([*command, "--ranks", str(ranks)], capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    wrong = [case["layout"] for case in report["layouts"] if not case["equal"]]
    return f"{len(report['layouts'])} layouts in {report['seconds']:.0f} s, {len(wrong)} differ {wrong[:3]}"


def main() -> None:
    """Print the table, put it into the page, or prove layouts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--layouts", type=int)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    if options.layouts:
        for name in families.CASES:
            print(f"{name}: {prove(name, options.layouts)}", flush=True)
        return
    text = "\n".join(table())
    if not options.write:
        print(text)
        return
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{START}\n\n{text}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
