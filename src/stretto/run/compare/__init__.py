"""Several combinations of settings of one job: what they are, and what their runs show."""
