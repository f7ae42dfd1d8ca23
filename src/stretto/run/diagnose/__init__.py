"""Which rank a hung job waits for, from the records of its ranks' calls."""
