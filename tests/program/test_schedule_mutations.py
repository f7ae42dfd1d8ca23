"""The checker accepts exactly the programs that a machine with real queues completes."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from brute_force import Machine, completes
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import accepts, mutate, seeds

from stretto.program import Program, check
from stretto.program.checks.transport import TRANSPORTS

PLAIN, LOWERED = seeds()
EASY = ["rendezvous", "buffered"]
# strict transports accept few mutations: start from programs that pass
SEEDS = [(p, t) for p in PLAIN for t in EASY]
SEEDS += [(p, t) for p in LOWERED for t in TRANSPORTS if t in EASY or accepts(p, t)]


@pytest.mark.parametrize(
    "program", PLAIN + LOWERED, ids=lambda p: f"{p.name}-{'lowered' if p.lowered else 'plain'}"
)
def test_what_schedules_lowering_and_transforms_give(program: Program):
    for transport in TRANSPORTS if program.lowered else EASY:
        accepted = accepts(program, transport)
        assert accepted == completes(program, 1, transport)
        assert accepted or transport not in EASY


@pytest.mark.parametrize("program", [p for p in PLAIN if p.versions], ids=lambda p: p.name)
def test_versions_are_those_in_use(program: Program):
    machine = Machine(program, 3, "rendezvous")
    assert machine.run()
    assert check(program).weight_versions == tuple(machine.most_versions[s] for s in range(program.stages))


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(SEEDS), st.integers(1, 3), st.randoms(use_true_random=False))
def test_mutated_programs(seed: tuple[Program, str], mutations: int, random: Random):
    program, transport = seed
    for _ in range(mutations):
        program = mutate(program, random)
    assert accepts(program, transport) == completes(program, random.randrange(1000), transport)


def campaign(seed: int, programs: int) -> Counter[tuple[str, bool]]:
    """Numbers of mutated programs that each transport accepted and refused."""
    random, verdicts = Random(seed), Counter[tuple[str, bool]]()
    by_transport = {t: [program for program, other in SEEDS if other == t] for t in TRANSPORTS}
    for turn in range(programs):
        transport = list(TRANSPORTS)[turn % len(TRANSPORTS)]
        mutated = random.choice(by_transport[transport])
        for _ in range(random.choice([1, 1, 1, 2, 3])):
            mutated = mutate(mutated, random)
        verdict = completes(mutated, random.randrange(1000), transport)
        assert accepts(mutated, transport) == verdict, (
            transport,
            [" ".join(map(str, order)) for order in mutated.orders],
            mutated,
        )
        verdicts[transport, verdict] += 1
    return verdicts


def test_thousands_of_mutated_programs():
    """A fixed campaign, so that both verdicts are known to be well covered for every transport."""
    verdicts = campaign(7, 2_000)
    assert min(verdicts[t, verdict] for t in TRANSPORTS for verdict in (False, True)) > 80


@pytest.mark.slow
def test_hundreds_of_thousands_of_mutated_programs():
    assert sum(campaign(8, 300_000).values()) == 300_000
