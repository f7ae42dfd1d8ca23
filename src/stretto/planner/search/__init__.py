"""The search of layouts: the space, its bounds, the order of candidates, the ranking and its reasons."""
