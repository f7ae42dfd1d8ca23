"""What every proof shares: relative errors over all ranks, module outputs, and the likeliest cause."""
