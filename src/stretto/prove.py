"""Prove that a parallel model trains as its plain model does in one process, and say why if it does not.

`prove` takes any module on any mesh; `stretto verify` and the proofs of recommenders share its comparison and
its list of causes.
"""

from __future__ import annotations

from stretto.verify.compare import Quantity
from stretto.verify.holdings import Split
from stretto.verify.user_model.model import prove
from stretto.verify.user_model.report import Differs, Report

__all__ = ["Differs", "Quantity", "Report", "Split", "prove"]
