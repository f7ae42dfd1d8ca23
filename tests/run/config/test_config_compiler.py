"""What `train.compile` needs is missed before a process starts."""

from __future__ import annotations

from pathlib import Path

import pytest

import stretto.run.config.device_checks as compiler_module
from proofs import verify
from stretto.errors import StrettoError
from stretto.run.config.check import check
from stretto.run.config.device_checks import compiler_problems
from tiny_job import LLAMA, changes, job, varied


def test_a_missing_compiler_is_said_by_train_and_by_verify(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = job(tmp_path, "train.compile=blocks", "train.device=auto", model=LLAMA)
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    monkeypatch.setattr(compiler_module, "find_spec", lambda _: None)
    wanted = r"train.compile.*blocks.*no-such-compiler -O2 is not on this machine"
    with pytest.raises(StrettoError, match=wanted) as found:
        check(config)
    assert "train.compile=off" in str(found.value.hint)
    with pytest.raises(StrettoError, match=wanted):
        verify(config, [varied(config, changes(dp=2))])
    check(job(tmp_path, model=LLAMA))


def test_gpus_need_triton_a_compiler_and_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "find_spec", lambda _: None)
    (problem,) = compiler_problems("blocks", "cuda")
    assert "Triton, which is not installed" in problem.rule
    assert not [*compiler_problems("blocks", "npu")], "a plug-in brings its own"
    monkeypatch.setattr(compiler_module, "find_spec", lambda _: object())
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(compiler_module, "which", lambda _: None)
    (problem,) = compiler_problems("blocks", "cuda")
    assert "neither gcc nor clang" in problem.rule
    monkeypatch.setattr(compiler_module, "which", lambda name: name)
    monkeypatch.setattr(compiler_module.sysconfig, "get_path", lambda _: "/nowhere")
    for device in ("cpu", "cuda", "auto"):
        (problem,) = compiler_problems("blocks", device)
        assert "/nowhere has no Python.h" in problem.rule
