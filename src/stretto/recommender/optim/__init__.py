"""Updates of embedding tables: only the rows that a step saw."""
