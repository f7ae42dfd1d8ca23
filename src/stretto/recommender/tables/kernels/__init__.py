"""Lookups and sums of rows."""
