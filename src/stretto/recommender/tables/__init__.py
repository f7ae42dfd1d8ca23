"""Embedding tables over ranks: requests, exchange, lookups."""
