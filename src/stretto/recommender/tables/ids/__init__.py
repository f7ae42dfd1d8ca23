"""How an id becomes a row: by modulo, by quotient and remainder, or by a map that grows."""
