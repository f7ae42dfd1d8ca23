"""Search for the best schedule for given costs and memory."""

from stretto.program.search.auto import Result, auto, search

__all__ = ["Result", "auto", "search"]
