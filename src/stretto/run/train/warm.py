"""Tables that every rank would otherwise build again: the fork server imports this module for its effect.

Ranks find the catalogue of machines, the config's fields and the schema of checkpoints in the caches of these
functions, which saves each of them 0.1 to 0.2 s; and torch finds what it looks up at the first call of an
operator on the meta device, and of an optimiser's step.
"""

from __future__ import annotations

import torch
from torch._dynamo.trace_rules import clear_lru_cache

from stretto.engine.checkpoint.metadata import record_schema
from stretto.engine.models.build import build
from stretto.job.shape import ModelShape
from stretto.planner.machines.catalogue import find_cluster
from stretto.run.config.schema import TrainConfig
from stretto.run.config.section import fields_of

find_cluster("h100")
list(fields_of(TrainConfig))
record_schema()

with torch.device("meta"):
    build(ModelShape(family="llama", layers=1, hidden=8, heads=1, ffn=8, vocab=8, sequence=8))
weight = torch.nn.Parameter(torch.zeros(1))
weight.grad = torch.zeros(1)
torch.optim.AdamW([weight]).step()
clear_lru_cache()  # as each rank will when its group begins, with copies of all the pages that it frees
