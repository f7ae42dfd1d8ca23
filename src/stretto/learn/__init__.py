"""Exercises that are graded on the reader's own file."""
