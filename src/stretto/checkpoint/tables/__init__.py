"""Embedding tables in checkpoints, by table, rows and columns."""
