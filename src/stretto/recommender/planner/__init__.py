"""Where embedding tables go: costs, placement, limits."""
