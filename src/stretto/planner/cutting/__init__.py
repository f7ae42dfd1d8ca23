"""Layers of uneven cost cut into the stages of a schedule."""
