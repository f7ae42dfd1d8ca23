"""Offloading to host memory, or to files that are read ahead and written behind."""
