"""Replay programs against costs."""

from stretto.simulate.bound import bound
from stretto.simulate.costs import Costs
from stretto.simulate.event import Event
from stretto.simulate.path import Cause
from stretto.simulate.replay import simulate
from stretto.simulate.timeline import Bubble, Timeline

__all__ = ["Bubble", "Cause", "Costs", "Event", "Timeline", "bound", "simulate"]
