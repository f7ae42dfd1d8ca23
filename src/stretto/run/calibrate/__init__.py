"""Measures this machine as training uses it: a profile, in place of what a catalogue says."""
