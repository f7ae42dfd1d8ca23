"""Replay programs against costs: timelines, bubbles, memory over time, critical paths, lower bounds."""

from stretto.program.replay.costs import Costs
from stretto.program.replay.lower_bound import bound
from stretto.program.replay.simulate import simulate
from stretto.program.replay.timeline import Bubble, Cause, Event, Timeline

__all__ = ["Bubble", "Cause", "Costs", "Event", "Timeline", "bound", "simulate"]
