"""Settings of all tests."""

from hypothesis import settings

# How long an example takes says how busy the machine is; nothing here is a test of speed.
settings.register_profile("stretto", deadline=None)
settings.load_profile("stretto")
