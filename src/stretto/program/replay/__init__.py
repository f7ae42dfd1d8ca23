"""Replay programs against costs: timelines, bubbles, memory over time, critical paths, lower bounds."""

from stretto.program.replay.costs import Costs
from stretto.program.replay.lower_bound import bound
from stretto.program.replay.simulate import simulate
from stretto.program.replay.timeline import Bubble, CriticalEvent, Event, Timeline

__all__ = ["Bubble", "Costs", "CriticalEvent", "Event", "Timeline", "bound", "simulate"]
