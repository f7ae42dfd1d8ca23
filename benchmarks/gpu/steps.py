"""The steps of the campaign, the most valuable first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from gpu.setting import Setting

LIMIT = 540.0  # seconds after which a step is stopped


@dataclass(frozen=True)
class Step:
    """One step: what it measures, where its function is, and about how long it takes on a large GPU.

    Attributes:
        function: as `module:name`, of a function from a setting to what goes into the JSON; with an argument
            after another colon.
        seconds: a step is not begun with less time left.
    """

    name: str
    title: str
    function: str
    seconds: float

    def run(self, setting: Setting) -> dict[str, Any]:
        """Do it."""
        module, name, *argument = self.function.split(":")
        function: Callable[..., dict[str, Any]] = getattr(import_module(f"gpu.{module}"), name)
        return partial(function, *argument)(setting)


STEPS = (
    Step("machine", "The machine and its ceilings", "machine:look", 40),
    Step("correct", "One rank beside the CPU's float64", "correct:one_rank", 120),
    Step("waits", "Host synchronisations", "waits:host_waits", 40),
    Step("gpt2-124m", "GPT-2 124M", "speed:model_race:gpt2-124m", 200),
    Step("llama-1b", "Llama-style 1B", "speed:model_race:llama-1b", 220),
    Step("memory", "Allocator's peak", "memory:peaks", 120),
    Step("streams", "Delays between streams", "waits:late_streams", 60),
    Step("library", "One rank through the device's communication library", "correct:own_library", 30),
    Step("gpt2-1.5b", "GPT-2 1.5B", "speed:model_race:gpt2-1.5b", 330),
    Step("llama3-8b", "Llama-3 8B", "speed:model_race:llama3-8b", 530),
    Step("llama3-8b-fp8", "Llama-3 8B in 8 bits", "speed:fp8_race", 450),
    Step("calibration", "Measured profile", "prediction:calibration", 150),
    Step("shapes", "Predicted step times", "prediction:shapes", 150),
    Step("tricks", "What each trick gains", "speed:tricks", 300),
    Step("attention", "Kernels of attention", "kernels:attention", 240),
    Step("llama-3b", "Llama-style 3B", "speed:model_race:llama-3b", 480),
    Step("moe-8x1b", "Mixture of 8 x 1B, top 2", "speed:model_race:moe-8x1b", 450),
    Step("overlap", "Profile of a step", "overlap:profiles", 120),
    Step("fp8-loss", "Loss in 8 bits on real text", "fp8:losses", 300),
    Step("dlrm", "DLRM with 20 GiB of tables", "dlrm:race", 240),
    Step("offload-cost", "Optimiser states on the host", "offload:cost", 240),
    Step("offload-large", "States beyond the device's memory", "offload:beyond", 300),
    Step("ranks", "Several ranks on one device", "correct:several_ranks", 180),
    Step("host", "The host's time for a step", "waits:host_time", 40),
    Step("suite", "The project's tests", "suite:folders", 500),
)
BY_NAME = {step.name: step for step in STEPS}
