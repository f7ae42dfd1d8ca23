"""Replay programs against costs."""

from stretto.simulate.costs import Costs
from stretto.simulate.replay import simulate
from stretto.simulate.timeline import Bubble, Event, Timeline

__all__ = ["Bubble", "Costs", "Event", "Timeline", "simulate"]
