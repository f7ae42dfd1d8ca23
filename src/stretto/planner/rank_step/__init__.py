"""The whole step of one rank: operations, bytes and calls."""
