"""Settings of all tests."""

import os
import signal
import tempfile

import pytest
from hypothesis import settings

# How long an example takes says how busy the machine is; nothing here is a test of speed.
settings.register_profile("stretto", deadline=None)
settings.load_profile("stretto")

# What the user has measured of this machine is none of the tests' business, nor are their runs his.
os.environ["XDG_CONFIG_HOME"] = os.path.join(tempfile.gettempdir(), "stretto-tests-have-no-profile")

# A shell starts what it runs in the background with Ctrl-C ignored; some tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of a file go to one worker, since they share its fixtures; those marked `apart` go anywhere:
    they start processes of their own and mostly wait for them.
    """
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            apart = item.get_closest_marker("apart") is not None
            item.add_marker(pytest.mark.xdist_group(item.nodeid if apart else str(item.path)))
