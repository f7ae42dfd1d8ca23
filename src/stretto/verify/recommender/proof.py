"""The proof of a recommender's placements: its cases, samples and memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from stretto.recommender.config.check import check, check_tables, find_problems
from stretto.recommender.config.schema import RecommenderConfig
from stretto.recommender.placement import TableSpec, physical_tables
from stretto.recommender.train.job import PRELOAD
from stretto.run.launch.local import check_ranks
from stretto.verify.fields import Section, set_fields, without_effect
from stretto.verify.recommender.cases import PlacementCase, cases_from_file, configured_case
from stretto.verify.recommender.every import AllCases, small
from stretto.verify.run import Findings, Impossible, Proof

if TYPE_CHECKING:
    from stretto.recommender.train.clicks import ClickData
    from stretto.verify.compare import Snapshot
    from stretto.verify.evidence import Verdict
    from stretto.verify.precision import Errors
    from stretto.verify.recommender.prove import TableReferences

STEPS = 3  # the second is the first with non-zero states; hash tables evict before the third


@dataclass(kw_only=True)
class RecommenderProof(Proof):
    """Placements of a recommender's tables.

    Attributes:
        config: the job.
        features: the table of each feature.
        clicks: the source of the job's samples; None: samples are random.
        fields: look for fields of the job that the proof does not see.
        own_types: compare with one process in the job's own types too.
    """

    noun: ClassVar[str] = "placement"
    preload: ClassVar[tuple[str, ...]] = PRELOAD
    config: RecommenderConfig
    features: Sequence[TableSpec]
    cases: Sequence[PlacementCase]
    clicks: ClickData | None = None
    fields: bool = False
    own_types: bool = False

    def needed_memory(self) -> tuple[float, str, str]:
        """Dense tables of all ranks' references, with gradients and states in float64."""
        tables = sum(8 * table.rows * table.dim for table in physical_tables(self.features))
        runs = 2 if self.fields else 1  # the steps of a changed field are compared with those of the job
        return (
            self.ranks * tables * (4 * self.steps * runs + 6),
            f"proving tables of {tables / 2**30:.1f} GiB in float64 on {self.ranks} ranks",
            "rows are alike: prove it with fewer, such as model.max_rows=10000",
        )

    def references(self) -> TableReferences:
        """What one process computes, once for all cases that share it."""
        from stretto.verify.recommender.prove import TableReferences

        warnings.filterwarnings("ignore", message="a cache of")  # growth of too small caches is wanted here
        clicks = None if self.clicks is None else self.clicks.open("train")
        return TableReferences(self.config, self.features, self.steps, clicks)

    def run_alone(self, folder: Path) -> list[list[Errors]]:
        """Errors of one process in the job's own types, for each case."""
        from stretto.verify.recommender.prove import one_process_errors

        references = self.references()
        return [one_process_errors(references, case, folder) for case in self.cases if self.own_types]

    def find(
        self, alone: list[list[Errors]] | None, folder: Path, report: Callable[[Verdict, int], None]
    ) -> Findings:
        """Compare the placements; tables on disk lie in the folder."""
        from stretto.verify.recommender.prove import prove, prove_placement_rounded

        references = self.references()
        findings = Findings(prove(references, self.cases, folder, report))
        if self.fields:
            first = next((case for case in self.cases if case.samples == "ragged"), self.cases[0])
            job = first.apply(self.config, self.features), tuple(self.features)

            def run(changed: RecommenderJob) -> Sequence[Snapshot]:
                trained = references.of(first) if changed == job else references.run(first, *changed)
                return trained.snapshots

            findings.unproved = without_effect(job, job_fields(job), run, first.clip)
        for number, (case, verdict) in enumerate(zip(self.cases, findings.verdicts, strict=True)):
            if self.own_types and verdict.equal:  # what differs in float64 is explained already
                errors = alone[number] if alone else None
                findings.rounded.append(prove_placement_rounded(references, case, folder, errors))
        return findings


RecommenderJob = tuple[RecommenderConfig, tuple[TableSpec, ...]]
_EVIDENT = {"preset", "family", "dense", "bottom", "top", "cross_rank", "rows", "tables", "max_rows", "lr"}
"""Sizes, of which any other value makes another model, and peak rates."""


def job_fields(job: RecommenderJob) -> Iterator[tuple[str, Any, RecommenderJob | None]]:
    """The set fields of model, tables and optimisers (`verify.fields.set_fields`)."""
    config, features = job

    def count_problems(job: RecommenderJob) -> int:
        return len(find_problems(job[0])) + len([*check_tables(job[0], list(job[1]))])

    optim, problems = config.optim, count_problems(job)

    def in_optim(name: str) -> Section[RecommenderJob]:
        def put(part: Any) -> RecommenderJob:
            return replace(config, optim=replace(optim, **{name: part})), features

        return Section(f"optim.{name}", getattr(optim, name), put)

    def of_table(at: int) -> Section[RecommenderJob]:
        def put(spec: TableSpec) -> RecommenderJob:
            return config, (*features[:at], spec, *features[at + 1 :])

        return Section(f"model.tables.{features[at].name}", features[at], put)

    sections = [
        Section("model", config.model, lambda model: (replace(config, model=model), features)),
        *map(of_table, range(len(features))),
        *map(in_optim, ("dense", "tables")),
    ]

    def is_legal(job: RecommenderJob) -> bool:
        changed, tables = job
        other = changed.shape(tables), tables, changed.optim  # null may stand for the value of a field
        if other == (config.shape(features), features, optim):
            return False
        return count_problems(job) <= problems

    return set_fields(sections, _EVIDENT, is_legal)


def recommender_proof(
    config: RecommenderConfig,
    features: Sequence[TableSpec],
    cases: Sequence[PlacementCase],
    steps: int = STEPS,
    impossible: Sequence[Impossible] = (),
    clicks: ClickData | None = None,
    fields: bool = False,
    own_types: bool = False,
) -> RecommenderProof:
    """The proof of these placements, all for one number of ranks.

    Args:
        fields: also look for fields of the job that the proof does not see.
        own_types: compare in the job's own types too, unless the job trains in float64.
    """
    exact = config.train.dtype == "float64"
    return RecommenderProof(
        config=config,
        features=tuple(features),
        cases=list(cases),
        clicks=clicks,
        fields=fields,
        own_types=own_types and not exact,
        float64_only=["the job trains in float64"] if own_types and exact else [],
        ranks=cases[0].ranks,
        threads=config.train.threads,
        timeout=timedelta(seconds=config.train.timeout_s),
        steps=steps,
        impossible=impossible,
        updated_by="formulas for rows and by torch.optim (LAMB: its formula) for dense weights",
    )


def proof_of(
    config: RecommenderConfig,
    layouts: str | None = None,
    *,
    ranks: int | None = None,
    steps: int | None = None,
    precision: bool | None = None,
    quiet: bool = True,
) -> RecommenderProof:
    """The proof that `stretto verify` makes: of the config's placement or those of a file, on the job's
    training samples, or of every placement on small tables of every kind.

    Args:
        layouts: "all", "product" or a file of placements; None: the config's own.
        ranks: of "all" and "product"; None: the config's.
        precision: compare in the job's own types too; None: yes, unless `layouts` is "all" or "product".

    Raises:
        StrettoError: what is wrong with config, data, placement or file.
    """
    from stretto.recommender.train.clicks import prepare_clicks
    from stretto.recommender.train.placement import place

    check(config)
    if layouts in ("all", "product"):
        world = ranks or config.layout.ranks
        check_ranks(world)
        small_config = small(config, world)
        tables = small_config.table_specs()
        every = AllCases(tables, world, config.layout.ranks_per_node, full=layouts == "product")
        return recommender_proof(
            small_config,
            tables,
            every.cases,
            steps or STEPS,
            every.impossible,
            fields=True,
            own_types=precision is True,
        )
    clicks = prepare_clicks(config, quiet=quiet)
    case = configured_case(config, clicks.tables, place(config, clicks))
    cases = [case] if layouts is None else cases_from_file(Path(layouts), config, clicks.tables, case)
    return recommender_proof(
        config,
        clicks.tables,
        cases,
        steps or STEPS,
        clicks=clicks,
        fields=True,
        own_types=precision is not False,
    )
