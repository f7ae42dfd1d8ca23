"""The fit of the software's constants to published runs, and of the width of intervals."""

from __future__ import annotations

import fit_steps  # pyright: ignore[reportMissingImports]
import leave_one_out  # pyright: ignore[reportMissingImports]
import numpy as np
import pytest

from stretto.planner.assumptions import software_profile


def test_a_fit_finds_the_constants_that_made_the_times() -> None:
    prior = fit_steps.point_of({name: constant.prior for name, constant in fit_steps.CONSTANTS.items()})
    names = list(fit_steps.CONSTANTS)
    slopes = np.random.default_rng(0).uniform(0.2, 1.0, (40, len(names)))
    slopes[:, names.index("sharded")] = 0.0
    truth = prior + 0.3 * np.array([constant.spread for constant in fit_steps.CONSTANTS.values()])
    table = fit_steps.Linear(prior, slopes @ (prior - truth), slopes)
    best = fit_steps.minimised([table], prior)
    assert np.abs(table(best)).mean() < 0.1 * np.abs(table(prior)).mean()
    assert best[names.index("sharded")] == prior[names.index("sharded")], "nothing depends on it"


def test_constants_reach_the_profiles_that_have_them() -> None:
    values = {"host": 5e-5, "alone": 1.2}
    old, new = (fit_steps.applied(name, software_profile(name), values) for name in ("unfused", "tuned"))
    assert (old.host, old.alone, new.alone) == (5e-5, 1.2, 1.2)
    assert new.host == software_profile("tuned").host


def test_a_width_holds_the_share_of_runs_of_each_table_equally() -> None:
    needed = [0.1 * at for at in range(1, 101)]
    assert leave_one_out.calibrated_scale([needed]) == pytest.approx(10 * leave_one_out.INSIDE)
    # a table of a thousand narrow rows does not hide a small wide one
    wide = [10.0] * 4
    assert leave_one_out.calibrated_scale([[0.5] * 1000, wide]) == 10.0
    assert leave_one_out.calibrated_scale([[0.5] * 1000] * 19 + [wide]) == 0.5
