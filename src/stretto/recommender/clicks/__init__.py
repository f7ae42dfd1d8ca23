"""Click logs: formats, transform, batches."""
