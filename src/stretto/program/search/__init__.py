"""Search for the best schedule for given costs and memory."""

from stretto.program.search.auto import ScheduleSearchResult, auto, search

__all__ = ["ScheduleSearchResult", "auto", "search"]
