"""The steps of the campaign, the most valuable first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from gpu.setting import Setting

LIMIT = 540.0  # seconds after which a step is stopped
NO_VALUES = "values, since its kernels and messages carry none"
NO_FLEX = "FlexAttention, whose trial compares values and so refuses it"
NO_PROFILE = "the profiler sees no kernels there, and the 1B's states take 15 GB of the host's memory"
BY_VALUES = "plain torch, some of whose tensors are as large as a value says"
ON_HOST = "it updates 38 to 125 GB of states in the host's memory"


@dataclass(frozen=True)
class Step:
    """One step: what it measures, where its function is, and about how long it takes on a large GPU.

    Attributes:
        function: as `module:name`, of a function from a setting to what goes into the JSON; with an argument
            after another colon.
        seconds: a step is not begun with less time left.
        unrehearsed: what of it a simulated GPU does not rehearse, and why.
        rehearsed: whether it runs there at all.
    """

    name: str
    title: str
    function: str
    seconds: float
    unrehearsed: str = ""
    rehearsed: bool = True

    def run(self, setting: Setting) -> dict[str, Any]:
        """Do it."""
        module, name, *argument = self.function.split(":")
        function: Callable[..., dict[str, Any]] = getattr(import_module(f"gpu.{module}"), name)
        return partial(function, *argument)(setting)


# A GPU is lent for 15 minutes. A wrong number makes every speed worthless, so the first six steps, ten
# minutes together, are the checks that no simulation makes: rounding of kernels first, on which all else
# rests, then missing waits, messages, what the allocator takes. Then speed, small models first: 124M fits
# into what is left of the 15 minutes and runs the same kernels. Models that take a session of their own and
# what explains their speed follow, and last what was tried without a GPU, or repeats what others show.
STEPS = (
    Step("correct", "One rank beside the CPU's float64", "correct:one_rank", 240, NO_VALUES),
    Step("waits", "Host synchronisations", "waits:host_waits", 40),
    Step("streams", "Delays between streams", "waits:late_streams", 60, NO_VALUES),
    Step(
        "library", "One rank through the device's communication library", "correct:own_library", 30, NO_VALUES
    ),
    Step("ranks", "Several ranks on one device", "correct:several_ranks", 90, NO_VALUES),
    Step("memory", "Allocator's peak", "memory:peaks", 120),
    Step("machine", "The machine and its ceilings", "machine:look", 40),
    Step("gpt2-124m", "GPT-2 124M", "speed:model_race:gpt2-124m", 200),
    Step("llama-1b", "Llama-style 1B", "speed:model_race:llama-1b", 220),
    Step("llama3-8b", "Llama-3 8B", "speed:model_race:llama3-8b", 530),
    Step("gpt2-1.5b", "GPT-2 1.5B", "speed:model_race:gpt2-1.5b", 330),
    Step("llama3-8b-fp8", "Llama-3 8B in 8 bits", "speed:fp8_race", 450),
    Step("calibration", "Measured profile", "prediction:calibration", 150),
    Step("shapes", "Predicted step times", "prediction:shapes", 150),
    Step("tricks", "What each trick gains", "speed:tricks", 300),
    Step("overlap", "Profile of a step", "overlap:profiles", 120, NO_PROFILE, rehearsed=False),
    Step("attention", "Kernels of attention", "kernels:attention", 240, NO_FLEX),
    Step("dlrm", "DLRM with 20 GiB of tables", "dlrm:race", 240, BY_VALUES),
    Step("moe-8x1b", "Mixture of 8 x 1B, top 2", "speed:model_race:moe-8x1b", 450, BY_VALUES),
    Step("llama-3b", "Llama-style 3B", "speed:model_race:llama-3b", 480),
    Step("fp8-loss", "Loss in 8 bits on real text", "fp8:losses", 300, NO_VALUES),
    Step("offload-cost", "Optimiser states on the host", "offload:cost", 240, ON_HOST, rehearsed=False),
    Step(
        "offload-large", "States beyond the device's memory", "offload:beyond", 300, ON_HOST, rehearsed=False
    ),
    Step("host", "The host's time for a step", "waits:host_time", 40),
    Step("suite", "The project's tests", "suite:folders", 500, NO_VALUES, rehearsed=False),
)
BY_NAME = {step.name: step for step in STEPS}
