"""Axes and rank groups, stage placement, and the division of layers into stages."""

from stretto.layout.cut import cut, describe_cut
from stretto.layout.layout import AXES, ORDER, Layout, RankGrid
from stretto.layout.placement import place

__all__ = ["AXES", "ORDER", "Layout", "RankGrid", "cut", "describe_cut", "place"]
