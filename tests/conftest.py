"""Settings of all tests."""

import os
import signal
import tempfile
from multiprocessing import set_forkserver_preload

# One thread a process: workers share the cores with the ranks of their tests, and threads that wait for each
# other spin, taking the cores from those that compute. Set before torch is imported; processes that tests
# start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

from stretto.run.launch import local

# The time of an example depends on the load of the machine; no property is about speed.
settings.register_profile("stretto", deadline=None)
settings.load_profile("stretto")

# Tests neither read the user's measured profile of this machine nor write to it.
os.environ["XDG_CONFIG_HOME"] = os.path.join(tempfile.gettempdir(), "stretto-tests-have-no-profile")

# All tests of a worker fork their ranks from one server, which imports once, when it starts. What the server
# has not imported, every rank of every test would import again, for seconds each time.
local.PRELOAD = (
    *local.PRELOAD,
    "stretto.run.train.worker",
    "stretto.run.verify.prove",
    "stretto.recommender.train.worker",
    "stretto.recommender.verify.prove",
    "stretto.cli.main",
    "torch._dynamo",  # imported by the first optimiser of a process
    "numpy.random",
    "numpy.ma",
    "numba",
    "hypothesis",
    "pytest",
)
set_forkserver_preload(list(local.PRELOAD))  # for a server that a test starts without `run_ranks`

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
