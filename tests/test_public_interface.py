"""What no version may silently lose: names, options, fields and keys, compared with `data/public.txt`."""

from __future__ import annotations

import pytest

import public_interface
from stretto import versions
from stretto.cli import report
from stretto.versions import Deprecated

TEXT = public_interface.FILE.read_text(encoding="utf-8")


def test_the_public_interface_is_that_of_the_file() -> None:
    found = public_interface.problems(TEXT, public_interface.current())
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("lost", "name"),
    [
        ("stretto.Layout: class (*, tp=1", "stretto.Layout"),
        ("stretto.Layout.world: ", "stretto.Layout.world"),
        ("stretto.prove.prove: (", "stretto.prove.prove"),
        ("stretto plan --model str, default None", "stretto plan --model"),
        ("TrainConfig: optim.lr: float = ", "optim.lr"),
        ("RecommenderConfig: eval.every: ", "eval.every"),
    ],
)
def test_what_is_gone_is_to_be_deprecated(monkeypatch: pytest.MonkeyPatch, lost: str, name: str) -> None:
    (line,) = [line for line in TEXT.splitlines() if line.startswith(lost)]
    fewer = TEXT.replace(f"{line}\n", "")
    first, then = public_interface.problems(TEXT, fewer)
    assert "versions.DEPRECATED" in first
    assert then == "then: python tests/public_interface.py (0 new, 1 gone)"
    assert public_interface.problems(fewer, TEXT) == [
        "then: python tests/public_interface.py (1 new, 0 gone)"
    ]
    monkeypatch.setattr(versions, "DEPRECATED", (Deprecated(name=name, instead="another", since="0.1"),))
    assert public_interface.problems(TEXT, fewer) == [then]


def test_a_key_that_is_gone_raises_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    line = next(line for line in TEXT.splitlines() if line.startswith("--json layout/1 $ | "))
    fewer = TEXT.replace(line, line.replace(" layout ", " "))
    first, _ = public_interface.problems(TEXT, fewer)
    assert first == "--json layout/1 $ | layout: is gone; raise JSON_VERSIONS['layout'] to 2, add a fragment"
    monkeypatch.setitem(report.JSON_VERSIONS, "layout", 2)
    assert public_interface.problems(TEXT, fewer.replace("--json layout/1", "--json layout/2"))[0].startswith(
        "then: "
    )
