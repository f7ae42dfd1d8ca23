"""Pipeline parallelism: run a program of forwards, backwards and messages on real ranks."""

from stretto.engine.parallel.data.stage_weights import ReplicatedWeights, StageWeights
from stretto.engine.pipeline.executor import Executor, ExecutorInputs, PipelineError
from stretto.engine.pipeline.pipeline import Pipeline
from stretto.engine.pipeline.rank_buffers import Boundary
from stretto.engine.pipeline.recorder import Recorder
from stretto.engine.pipeline.shared import PartialGradient, sum_gradients
from stretto.engine.pipeline.skips import Skip

__all__ = [
    "Boundary",
    "Executor",
    "ExecutorInputs",
    "PartialGradient",
    "Pipeline",
    "PipelineError",
    "Recorder",
    "ReplicatedWeights",
    "Skip",
    "StageWeights",
    "sum_gradients",
]
