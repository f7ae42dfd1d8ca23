"""The proof of a recommender's placements: its cases, samples and memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from stretto.recommender.config.check import check
from stretto.recommender.config.schema import RecommenderConfig
from stretto.recommender.placement import TableSpec, physical_tables
from stretto.recommender.train.job import PRELOAD
from stretto.run.launch.local import check_ranks
from stretto.verify.recommender.cases import PlacementCase, cases_from_file, configured_case
from stretto.verify.recommender.every import AllCases, small
from stretto.verify.run import Findings, Impossible, Proof

if TYPE_CHECKING:
    from stretto.recommender.train.clicks import ClickData
    from stretto.verify.diagnose import Verdict

STEPS = 3  # the second is the first with non-zero states; hash tables evict before the third


@dataclass(kw_only=True)
class RecommenderProof(Proof):
    """Placements of a recommender's tables.

    Attributes:
        config: the job.
        features: the table of each feature.
        clicks: the source of the job's samples; None: samples are random.
    """

    noun: ClassVar[str] = "placement"
    preload: ClassVar[tuple[str, ...]] = PRELOAD
    config: RecommenderConfig
    features: Sequence[TableSpec]
    cases: Sequence[PlacementCase]
    clicks: ClickData | None = None

    def needed_memory(self) -> tuple[float, str, str]:
        """Dense tables of all ranks' references, with gradients and states in float64."""
        tables = sum(8 * table.rows * table.dim for table in physical_tables(self.features))
        return (
            self.ranks * tables * (4 * self.steps + 6),
            f"proving tables of {tables / 2**30:.1f} GiB in float64 on {self.ranks} ranks",
            "rows are alike: prove it with fewer, such as model.max_rows=10000",
        )

    def find(self, alone: Any, folder: Path, report: Callable[[Verdict, int], None]) -> Findings:
        """Compare the placements; tables on disk lie in the folder."""
        from stretto.verify.recommender.prove import TableReferences, prove

        warnings.filterwarnings("ignore", message="a cache of")  # growth of too small caches is wanted here
        clicks = None if self.clicks is None else self.clicks.open("train")
        references = TableReferences(self.config, self.features, self.steps, clicks)
        return Findings([*prove(references, self.cases, folder, report)])


def recommender_proof(
    config: RecommenderConfig,
    features: Sequence[TableSpec],
    cases: Sequence[PlacementCase],
    steps: int = STEPS,
    impossible: Sequence[Impossible] = (),
    clicks: ClickData | None = None,
) -> RecommenderProof:
    """The proof of these placements, all for one number of ranks."""
    return RecommenderProof(
        config=config,
        features=tuple(features),
        cases=list(cases),
        clicks=clicks,
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
    quiet: bool = True,
) -> RecommenderProof:
    """The proof that `stretto verify` makes: of the config's placement or those of a file, on the job's
    training samples, or of every placement on small tables of every kind.

    Args:
        layouts: "all", "product" or a file of placements; None: the config's own.
        ranks: of "all" and "product"; None: the config's.

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
        return recommender_proof(small_config, tables, every.cases, steps or STEPS, every.impossible)
    clicks = prepare_clicks(config, quiet=quiet)
    case = configured_case(config, clicks.tables, place(config, clicks))
    cases = [case] if layouts is None else cases_from_file(Path(layouts), config, clicks.tables, case)
    return recommender_proof(config, clicks.tables, cases, steps or STEPS, clicks=clicks)
