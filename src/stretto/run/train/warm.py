"""Tables that every rank would otherwise build again: the fork server imports this module for its effect.

Ranks find the catalogue of machines, the config's fields and the schema of checkpoints in the caches of these
functions, which saves each of them 0.1 to 0.2 s.
"""

from __future__ import annotations

from stretto.engine.checkpoint.metadata import record_schema
from stretto.planner.machines.catalogue import find_cluster
from stretto.run.config.schema import TrainConfig
from stretto.run.config.section import fields_of

find_cluster("h100")
list(fields_of(TrainConfig))
record_schema()
