"""What the server that ranks are forked from reads once for all of them; `conftest.py` has it import this."""

from stretto.planner.assumptions import software_profiles
from stretto.planner.machines.catalogue import cluster_aliases, clusters, entries
from stretto.planner.time.constants import constants

entries()
clusters()
cluster_aliases()
software_profiles()
constants("operators")
constants("collectives")
