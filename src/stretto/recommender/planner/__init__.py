"""Placement of embedding tables: cost model, search and memory limits."""
