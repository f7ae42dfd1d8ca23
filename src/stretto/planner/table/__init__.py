"""Tables of measured runs: rows to jobs, predictions, scores."""
