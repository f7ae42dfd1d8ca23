"""Stretto: plan, draw, prove and run hybrid-parallel training.

What this module exports is the public interface; everything else may change from one version to the next
(see CONTRIBUTING.md). A name is imported when it is first used, so `import stretto` costs next to nothing,
and layouts, schedules, programs and predictions work without PyTorch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stretto import prove
    from stretto.autosplit.plan_module import plan_module
    from stretto.engine.optim.base import FragmentOptimizer
    from stretto.engine.optim.data_parallel import data_parallel
    from stretto.engine.parallel.fragment import ParameterFragment
    from stretto.engine.parallel.mesh import Mesh
    from stretto.engine.parallel.parallelize import parallelize
    from stretto.engine.parallel.styles import (
        BatchParallel,
        ColumnParallel,
        GatherBatch,
        ParallelStyle,
        ParameterShard,
        Replicate,
        RowParallel,
        ShardRange,
        VocabParallel,
    )
    from stretto.engine.parallel.tensor.dropout import DropoutKeys, key_dropout
    from stretto.engine.parallel.traffic import traffic
    from stretto.engine.pipeline import Pipeline, ReplicatedWeights, Skip, sum_gradients
    from stretto.errors import StrettoError
    from stretto.layout import Layout, place
    from stretto.planner.cutting.partition import partition
    from stretto.program import Action, ActionKind, Program, ScheduleError, check, lower, schedule
    from stretto.program.replay import Costs, simulate
    from stretto.program.schedules.registry import register
    from stretto.recommender.clicks.batch import ClickBatch
    from stretto.recommender.config.load import load_config, parse_config
    from stretto.recommender.config.placement import configured_placements
    from stretto.recommender.config.schema import RecommenderConfig
    from stretto.recommender.serve.scorer import Scorer
    from stretto.recommender.tables.jagged import Jagged
    from stretto.recommender.train.engine import Recommender
    from stretto.run.calibrate.modules import profile_layers
    from stretto.run.launch.local import RankFailed, run_ranks
    from stretto.versions import __version__
    from stretto.view.widget import timeline_widget

__all__ = [
    "Action",
    "ActionKind",
    "BatchParallel",
    "ClickBatch",
    "ColumnParallel",
    "Costs",
    "DropoutKeys",
    "FragmentOptimizer",
    "GatherBatch",
    "Jagged",
    "Layout",
    "Mesh",
    "ParallelStyle",
    "ParameterFragment",
    "ParameterShard",
    "Pipeline",
    "Program",
    "RankFailed",
    "Recommender",
    "RecommenderConfig",
    "Replicate",
    "ReplicatedWeights",
    "RowParallel",
    "ScheduleError",
    "Scorer",
    "ShardRange",
    "Skip",
    "StrettoError",
    "VocabParallel",
    "__version__",
    "check",
    "configured_placements",
    "data_parallel",
    "key_dropout",
    "load_config",
    "lower",
    "parallelize",
    "parse_config",
    "partition",
    "place",
    "plan_module",
    "profile_layers",
    "prove",
    "register",
    "run_ranks",
    "schedule",
    "simulate",
    "sum_gradients",
    "timeline_widget",
    "traffic",
]

# where each name is defined, as in the imports above
_MODULES = {
    "stretto": ("prove",),  # a module, as `from stretto.prove import prove` has it
    "stretto.engine.optim.base": ("FragmentOptimizer",),
    "stretto.engine.optim.data_parallel": ("data_parallel",),
    "stretto.engine.parallel.fragment": ("ParameterFragment",),
    "stretto.engine.parallel.mesh": ("Mesh",),
    "stretto.engine.parallel.parallelize": ("parallelize",),
    "stretto.autosplit.plan_module": ("plan_module",),
    "stretto.engine.parallel.styles": (
        "BatchParallel",
        "ColumnParallel",
        "GatherBatch",
        "ParameterShard",
        "Replicate",
        "RowParallel",
        "ShardRange",
        "ParallelStyle",
        "VocabParallel",
    ),
    "stretto.engine.parallel.tensor.dropout": ("DropoutKeys", "key_dropout"),
    "stretto.engine.parallel.traffic": ("traffic",),
    "stretto.engine.pipeline": ("Pipeline", "ReplicatedWeights", "Skip", "sum_gradients"),
    "stretto.errors": ("StrettoError",),
    "stretto.layout": ("Layout", "place"),
    "stretto.planner.cutting.partition": ("partition",),
    "stretto.program": ("Action", "ActionKind", "Program", "ScheduleError", "check", "lower", "schedule"),
    "stretto.program.replay": ("Costs", "simulate"),
    "stretto.program.schedules.registry": ("register",),
    "stretto.recommender.clicks.batch": ("ClickBatch",),
    "stretto.recommender.config.load": ("load_config", "parse_config"),
    "stretto.recommender.config.placement": ("configured_placements",),
    "stretto.recommender.config.schema": ("RecommenderConfig",),
    "stretto.recommender.serve.scorer": ("Scorer",),
    "stretto.recommender.tables.jagged": ("Jagged",),
    "stretto.recommender.train.engine": ("Recommender",),
    "stretto.run.calibrate.modules": ("profile_layers",),
    "stretto.run.launch.local": ("RankFailed", "run_ranks"),
    "stretto.versions": ("__version__",),
    "stretto.view.widget": ("timeline_widget",),
}
_MODULE_OF = {name: module for module, exported in _MODULES.items() for name in exported}


def __dir__() -> list[str]:
    return sorted(__all__)


def _deprecated(name: str) -> object:
    """Return what a deprecated name stands for, with a warning."""
    from stretto.versions import DEPRECATED

    for each in DEPRECATED:
        if each.name == f"stretto.{name}":
            each.check(stacklevel=4)
            return getattr(import_module("stretto"), each.instead.removeprefix("stretto."))
    raise AttributeError(f"module 'stretto' has no attribute {name!r}")


if not TYPE_CHECKING:  # a type checker must not take every misspelt name for an attribute

    def __getattr__(name: str) -> object:
        if name not in _MODULE_OF:
            return _deprecated(name)
        try:
            module = _MODULE_OF[name]
            inside = module == "stretto"  # a module of the package
            value = import_module(f"stretto.{name}") if inside else getattr(import_module(module), name)
        except ModuleNotFoundError as error:
            from stretto.errors import PackageMissing

            raise PackageMissing.of(error, f"stretto.{name}") or error from None
        globals()[name] = value  # the next access does not come here
        return value
