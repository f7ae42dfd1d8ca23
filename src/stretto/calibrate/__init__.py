"""Measures this machine as training uses it: a profile that plan and predict take in place of a catalogue's."""
