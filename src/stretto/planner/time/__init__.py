"""How long operations and collectives take: physics with few constants, fitted to measured tables."""
