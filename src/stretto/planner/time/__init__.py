"""Time of operations and collectives: physics with few constants, fitted to measured tables."""
