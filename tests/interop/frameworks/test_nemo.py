"""Megatron-Bridge: every override names a field that its config has."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from stretto.errors import StrettoError
from stretto.job.data_parallel import DataParallelSettings, Precision
from stretto.job.job import Job, Recompute
from stretto.job.optimiser import Optimiser, RateSchedule
from stretto.job.presets import preset
from stretto.layout.layout import Layout
from stretto_interop.frameworks.fields import JobValues, values_of
from stretto_interop.frameworks.mapping import settings_of
from stretto_interop.frameworks.nemo import NEMO, overrides

FIELDS = yaml.safe_load(Path(__file__).with_name("nemo_fields.yaml").read_text())
BFLOAT16, HALF = Precision(dtype="bfloat16"), Precision(dtype="float16")
LLAMA = Job(
    shape=preset("llama3-8b"),
    layout=Layout(tp=2, cp=2, dp=4, pp=4),
    global_batch=64,
    schedule="interleaved",
    options={"chunks": 2},
    sequence_parallel=True,
    dp=DataParallelSettings(mode="zero1"),
    precision=BFLOAT16,
)
JOBS = {
    "llama": LLAMA,
    "even": replace(LLAMA, stage_layers=(5, 4, 4, 4, 4, 4, 4, 5), recompute=Recompute("full", blocks=1)),
    "gpt": Job(
        shape=preset("gpt2"), layout=Layout(dp=4), global_batch=8, precision=Precision(dtype="float16")
    ),
    "experts": Job(
        shape=preset("mixtral-8x7b"),
        layout=Layout(tp=2, dp=8, ep=8, expert_tp=1),
        expert_tp=1,
        global_batch=64,
        dp=DataParallelSettings(mode="zero3"),
        precision=replace(BFLOAT16, fp8="tensor"),
    ),
    "latent": Job(
        shape=preset("deepseek-v3"),
        layout=Layout(dp=16, pp=8, ep=16),
        global_batch=64,
        precision=BFLOAT16,
        recompute=Recompute("selective"),
        dp=DataParallelSettings(mode="zero1", offload="cpu"),
    ),
}


def settings(job: Job) -> dict[str, object]:
    return settings_of(NEMO, JobValues(values_of(job).values))[0]


@pytest.mark.parametrize("name", JOBS)
def test_every_override_is_a_field(name: str) -> None:
    values = overrides(settings(JOBS[name]))
    fields = {f"{section}.{name}" for section, names in FIELDS.items() for name in names}
    assert set(values) - fields == {"mixed_precision"}


def test_values_are_those_of_the_job() -> None:
    values = overrides(settings(JOBS["even"]))
    assert values["model.virtual_pipeline_model_parallel_size"] == 2
    assert values["model.pipeline_model_parallel_layout"] is None  # a recipe may have one
    assert values["model.share_embeddings_and_output_weights"] is False
    assert (values["mixed_precision"], values["model.recompute_num_layers"]) == ("bf16_mixed", 1)
    uneven = overrides(settings(LLAMA))
    assert uneven["model.virtual_pipeline_model_parallel_size"] == 2
    assert uneven["model.pipeline_model_parallel_layout"].startswith("E")
    assert overrides(settings(JOBS["experts"]))["mixed_precision"] == "bf16_with_fp8_current_scaling_mixed"
    assert overrides(settings(JOBS["gpt"]))["model.add_bias_linear"] is True


@pytest.mark.parametrize("name", JOBS)
def test_bash_takes_the_script(name: str, tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(NEMO.render(settings(JOBS[name]), ["a note"]))
    code = f"source {path} && printf '%s\\n' \"${{OVERRIDES[@]}}\""
    environment = {"DATA_SOURCE": "/data/tokens", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", code], env=environment, capture_output=True, text=True, check=True)
    arguments = done.stdout.splitlines()
    assert "model.num_moe_experts=null" in arguments or name in ("experts", "latent")
    assert f"model.num_layers={JOBS[name].shape.layers}" in arguments
    assert "dataset.blend=/data/tokens" in arguments


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (replace(LLAMA, precision=replace(BFLOAT16, gradients="same")), "precision.gradients is same"),
        (replace(LLAMA, optimiser=Optimiser(states="bfloat16")), "optim.states is bfloat16"),
        (
            replace(LLAMA, optimiser=Optimiser(rate=RateSchedule(schedule="wsd", decay="sqrt"))),
            "optim.rate.decay is sqrt",
        ),
    ],
)
def test_what_megatron_bridge_lacks_is_refused_by_name(job: Job, message: str) -> None:
    with pytest.raises(StrettoError, match=message):
        settings(job)
