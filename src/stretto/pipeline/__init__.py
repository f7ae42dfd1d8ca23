"""Run programs on real ranks."""

from stretto.pipeline.executor import Executor, PipelineError, Work
from stretto.pipeline.live import Boundary
from stretto.pipeline.partial import PartialGradient
from stretto.pipeline.pipeline import Pipeline
from stretto.pipeline.recorder import Recorder
from stretto.pipeline.skips import Skip

__all__ = [
    "Boundary",
    "Executor",
    "PartialGradient",
    "Pipeline",
    "PipelineError",
    "Recorder",
    "Skip",
    "Work",
]
