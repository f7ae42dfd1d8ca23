"""Dry run: one rank of a huge job in one process on tensors without values; counts FLOPs, messages, bytes."""
