"""Tests of benchmarks/published, whose folder is imported from."""

from __future__ import annotations

import sys

from pages import ROOT

sys.path.append(str(ROOT / "benchmarks"))
