"""Checkpoints: save, commit, verify, reshard, import, export.

`folder`, `manifest`, `index` and `files` do not import torch, so that commands that only inspect checkpoints
start at once.
"""
