"""The campaign for one GPU (benchmarks/gpu), rehearsed on the CPU in tiny sizes."""

from __future__ import annotations

import inspect
import json
import re
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from stretto.engine.models.build import build
from stretto.engine.models.weights import initialise
from stretto.planner.memory.job import memory_of
from stretto.planner.memory.ranks import rank_memory

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

campaign: Any = import_module("gpu.campaign")
correct: Any = import_module("gpu.correct")
jobs: Any = import_module("gpu.jobs")
memory: Any = import_module("gpu.memory")
offload: Any = import_module("gpu.offload")
overlap: Any = import_module("gpu.overlap")
plain: Any = import_module("gpu.plain")
report: Any = import_module("gpu.report")
speed: Any = import_module("gpu.speed")
steps: Any = import_module("gpu.steps")
waits: Any = import_module("gpu.waits")
Setting: Any = import_module("gpu.setting").Setting


@pytest.fixture
def setting(tmp_path: Path) -> Any:
    return Setting(torch.device("cpu"), True, tmp_path)


def test_every_step_names_a_function_that_takes_its_argument() -> None:
    for step in steps.STEPS:
        module, name, *argument = step.function.split(":")
        function = getattr(import_module(f"gpu.{module}"), name)
        inspect.signature(function).bind(*argument, "the setting")
        assert step.seconds < steps.LIMIT
    assert len(steps.BY_NAME) == len(steps.STEPS)
    shown = {name for _, names, _ in report.SECTIONS for name in names}
    assert shown == set(steps.BY_NAME), "the page shows every step"


def test_full_sizes_are_legal_jobs(tmp_path: Path) -> None:
    """What only a GPU will run in full."""
    full = Setting(torch.device("cuda"), False, tmp_path)
    for model in jobs.MODELS.values():
        for overrides in ((), jobs.fastest(full, model.section)):
            job = jobs.legal(model.config(full, *overrides))
            assert job.microbatches == model.microbatches
            assert rank_memory(memory_of(job))[0].total < 130 * 2**30, "of an H200's 131.3 GiB"
    for trick in jobs.known_tricks():
        for value in (trick.value, trick.without):
            jobs.legal(jobs.MODELS["llama-1b"].config(full, f"{trick.field}={value}"))
    prediction: Any = import_module("gpu.prediction")
    for section, sequence, micro, microbatches in prediction.SHAPES.values():
        jobs.legal(jobs.config({"vocab": 50304, **section}, sequence, micro, microbatches, full))
    for config in memory.jobs(full).values():
        jobs.legal(config)
    fp8: Any = import_module("gpu.fp8")
    for overrides in fp8.CASES.values():
        fp8.configured(overrides, full)
    jobs.legal(jobs.config(offload.LARGE, 4096, 1, 8, full, "dp.offload=cpu", *offload.LARGE_WORDS))


@pytest.mark.parametrize("name", ["gpt2-124m", "llama-1b", "moe-8x1b"])
def test_plain_torch_is_the_same_model(name: str, setting: Any) -> None:
    """With Stretto's weights it has Stretto's loss and gradients."""
    shape = jobs.legal(jobs.MODELS[name].config(setting)).shape
    stretto_model = build(shape)
    initialise(stretto_model, 0)
    torch_model = plain.Model(shape, shape.vocab)
    torch_model.load_state_dict(stretto_model.state_dict())
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(shape.vocab, (2, shape.sequence + 1), generator=draw)
    x, y = ids[:, :-1], ids[:, 1:]
    expected = F.cross_entropy(stretto_model(x).flatten(0, 1), y.flatten())
    loss = torch_model(x, y)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    gradients = {name: p.grad for name, p in stretto_model.named_parameters()}
    for name, parameter in torch_model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_another_model_is_not_right(dtype: str, setting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that differs in how fast positions turn, within the tolerances of its type."""
    references, case = correct.References(setting), correct.Case("llama", jobs.LLAMA)
    assert correct.check(setting, case, dtype, references)["right"]
    other = references.of(correct.Case("other", {**jobs.LLAMA, "rope_theta": 9000.0}))
    monkeypatch.setattr(references, "of", lambda _: other)
    row = correct.check(setting, case, dtype, references)
    assert not row["right"]
    assert row["loss_error"] < 0.01, "no crude difference"


@pytest.mark.slow
def test_race_and_its_page(setting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One contestant that cannot run stops no other."""
    monkeypatch.setattr(speed, "peak", lambda _: 1e12)
    model = jobs.MODELS["llama-1b"]

    def fail() -> dict[str, Any]:
        raise RuntimeError("out of memory")

    found = speed.race(
        model,
        setting,
        {"Stretto": lambda: speed.run_stretto(model, setting), "broken": fail}
        | {speed.PLAIN: lambda: speed.run_plain(model, setting, compiled=False)},
    )
    rows = found["rows"]
    assert rows["broken"]["error"] == "RuntimeError: out of memory"
    tokens = found["tokens"]
    assert rows["Stretto"]["tokens_per_s"] == pytest.approx(tokens / rows["Stretto"]["median_s"])
    assert rows["Stretto"]["mfu"] == pytest.approx(found["flops"] / rows["Stretto"]["median_s"] / 1e12)
    assert json.loads(setting.partial.read_text())["rows"].keys() == rows.keys()
    page = report.page(record_of("llama-1b", found))
    assert "| broken | RuntimeError: out of memory |" in page
    ratio = rows[speed.PLAIN]["median_s"] / rows["Stretto"]["median_s"]
    assert (
        f"| llama-1b: over compiled torch | >= 1.1 | {ratio:.2f} | {'yes' if ratio >= 1.1 else 'no'} |"
        in page
    )


def record_of(name: str, result: Any, state: str = "done") -> dict[str, Any]:
    context = {"time": "2026-01-02T03:04:05", "commit": "abc", "device": "a GPU", "torch": "2", "tiny": False}
    record = {
        "step": name,
        "title": name,
        "state": state,
        "seconds": 1.0,
        "error": "Traceback\nboom",
        **context,
    }
    return {step.name: {**record, "result": result} if step.name == name else None for step in steps.STEPS}


def test_goals_are_judged() -> None:
    fast, slow = (
        {"median_s": 1.0, "mfu": 0.6, "seconds": [1.0]},
        {"median_s": 1.05, "mfu": 0.5, "seconds": [1.05]},
    )
    found = {
        "goal_mfu": 0.54,
        "rows": {"Stretto": slow, "Stretto train.compile=blocks": fast, speed.PLAIN: slow},
    }
    assert report.mfu_goal(found) == ("60.0%", True)
    assert report.ratio_goal(found) == ("1.05", False)
    assert report.fp8_goal({"rows": {"bf16": {"median_s": 1.4}, "fp8=row": fast}}) == ("1.40", True)
    assert report.waits_goal({"goal": 1, "rows": [{"each_step": 1.0}, {"each_step": 3.0}]}) == (
        "3.0 at most",
        False,
    )
    assert (
        report.memory_goal({"goal": 0.05, "rows": {"a": {"error": -0.06}, "b": {"error": "no"}}})[1] is False
    )
    losses = {"bf16": {"last": 2.0}, "fp8=row": {"last": 2.004}, "fp8=tensor": {"last": 2.02}}
    assert report.loss_goal({"goal": 0.005, "rows": losses}) == ("1.00%", False)
    stretto_result, peer = {"seconds": [1.0, 2.0, 3.0]}, {"seconds": [2.6]}
    rows = {
        "Stretto, uniform ids": stretto_result,
        "plain PyTorch, uniform ids": peer,
        "TorchRec, uniform ids": {"error": "x"},
    }
    assert report.dlrm_goal({"rows": rows}, "plain PyTorch", 1.2) == ("1.30", True)
    assert report.dlrm_goal({"rows": rows}, "TorchRec", 1.0) == ("no figure", None)


def test_a_step_is_recorded(setting: Any) -> None:
    record = campaign.do(steps.BY_NAME["machine"], setting.folder, "cpu", "cpu")
    assert record["state"] == "done", record.get("error")
    assert campaign.read(setting.folder, steps.BY_NAME["machine"]) == json.loads(json.dumps(record))


@pytest.mark.slow
def test_cheap_steps(setting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that take no ranks and no compiler, through the campaign's own way of running one."""
    monkeypatch.setattr(waits, "JOBS", dict(list(waits.JOBS.items())[3:4]))
    for module in (waits, overlap):
        monkeypatch.setattr(module, "fastest", lambda *_: ())
    monkeypatch.setattr(waits, "WARM_UP", 1)
    monkeypatch.setattr(waits, "STEPS", 1)
    monkeypatch.setattr(overlap, "JOBS", dict(list(overlap.JOBS.items())[:1]))
    monkeypatch.setattr(memory, "jobs", lambda s: {"llama-1b": jobs.MODELS["llama-1b"].config(s)})
    for name in ("machine", "waits", "streams", "memory", "overlap", "offload-large", "host"):
        record = campaign.do(steps.BY_NAME[name], setting.folder, "cpu", "cpu")
        assert record["state"] == "done", record.get("error")
        assert campaign.read(setting.folder, steps.BY_NAME[name]) == json.loads(json.dumps(record))
    records = {step.name: campaign.read(setting.folder, step) for step in steps.STEPS}
    page = report.page(records)
    assert "A rehearsal" in page
    assert abs(records["memory"]["result"]["rows"]["llama-1b"]["error"]) < 0.01
    assert "| `machine` | The machine and its ceilings | done |" in page


def test_a_step_that_fails_is_recorded_and_comes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = replace(steps.BY_NAME["waits"], function="waits:nothing")
    record = campaign.do(broken, tmp_path, "cpu", "cpu")
    assert record["state"] == "failed"
    assert "AttributeError" in record["error"]
    campaign.write(tmp_path, steps.BY_NAME["machine"], {"state": "done"})
    left = [step.name for step in campaign.to_do(tmp_path, [])]
    assert "machine" not in left
    assert left[-1] == "waits"
    assert left[0] == "correct"
    assert [step.name for step in campaign.to_do(tmp_path, ["machine"])] == ["machine"]
    (tmp_path / "memory.json").write_text('{"half')
    assert campaign.read(tmp_path, steps.BY_NAME["memory"]) is None


def test_a_step_whose_process_is_stopped_leaves_what_it_had(tmp_path: Path) -> None:
    """Before it has imported torch."""
    step = steps.BY_NAME["memory"]
    (tmp_path / "memory.partial").write_text('{"rows": {}}')
    record = campaign.apart(step, tmp_path, "cpu", "cpu", limit=0.05)
    assert record["state"] == "stopped"
    assert record["result"] == {"rows": {}}
    assert campaign.campaign(tmp_path, [step], "cpu", None, seconds=step.seconds - 1) == []
    page = report.page({**record_of("memory", {"rows": {}}), "memory": campaign.read(tmp_path, step)})
    assert "stopped: stopped after 0 s" in page


def test_overlap_is_read_from_a_trace() -> None:
    def event(kind: str, start: float, end: float) -> dict[str, Any]:
        return {"cat": kind, "ts": 1e6 * start, "dur": 1e6 * (end - start), "name": f"{kind} at {start}"}

    events = [event("kernel", 0, 2), event("kernel", 1, 3), event("gpu_memcpy", 2, 4), event("kernel", 6, 7)]
    found = overlap.facts([*events, event("cpu_op", 0, 9)])
    assert found["seconds"] == pytest.approx(7)
    assert found["idle"] == pytest.approx(2)
    assert found["copying_beside_kernels"] == pytest.approx(1)
    assert found["kernels"] == 3


def test_the_page_is_that_of_the_results() -> None:
    """docs/evidence/gpu-campaign.md is what `python benchmarks/gpu/campaign.py --report` prints."""
    records = {step.name: campaign.read(campaign.RESULTS, step) for step in steps.STEPS}
    assert (ROOT / "docs/evidence/gpu-campaign.md").read_text(encoding="utf-8") == report.page(records)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_campaign(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every step as on a GPU: a process each."""
    code = campaign.main(["--rehearse", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert code == 0, printed
    records = {step.name: campaign.read(tmp_path, step) for step in steps.STEPS}
    page = report.page(records)
    assert not re.search(report.NOT_YET, page)
    for name in ("correct", "library", "ranks"):
        found = records[name]["result"]
        assert found["right"] == found["of"], [row for row in found["rows"] if not row["right"]]
    assert campaign.to_do(tmp_path, []) == []
