"""Settings of all tests."""

import signal

from hypothesis import settings

# How long an example takes says how busy the machine is; nothing here is a test of speed.
settings.register_profile("stretto", deadline=None)
settings.load_profile("stretto")

# A shell starts what it runs in the background with Ctrl-C ignored; some tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
