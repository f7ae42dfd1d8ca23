"""Offloading to host memory, or to files with read-ahead and write-behind."""
