"""One rank of a huge job in one process, without values: what it computes, sends and holds, counted."""
