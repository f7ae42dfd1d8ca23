"""Measure this machine the way training uses it: a profile that replaces the catalogue's figures."""
