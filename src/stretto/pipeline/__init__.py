"""Run programs on real ranks."""

from stretto.pipeline.executor import Executor, PipelineError
from stretto.pipeline.live import Boundary
from stretto.pipeline.pipeline import PartialGradient, Pipeline

__all__ = ["Boundary", "Executor", "PartialGradient", "Pipeline", "PipelineError"]
