"""Watching ranks while they train: which one hangs, and which one is slow."""
