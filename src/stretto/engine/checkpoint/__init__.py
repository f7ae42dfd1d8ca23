"""Checkpoints: save, commit, verify, reshard, import, export.

`folder`, `manifest`, `index` and `files` do without torch, so that commands that only look start at once;
`save`, `load`, `latest` and `verify` are in the modules of that work.
"""
