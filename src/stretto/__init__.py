"""Stretto: plan, draw, prove and run hybrid-parallel training."""
