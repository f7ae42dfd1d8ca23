"""Verifies a recommender's placements: prepares samples, starts ranks, collects the verdicts."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.errors import StrettoError
from stretto.recommender.config.schema import RecommenderConfig
from stretto.recommender.placement import TableSpec, physical_tables
from stretto.recommender.train.job import PRELOAD
from stretto.run.launch.local import check_ranks, prepare, run_ranks
from stretto.verify.language.job import Progress
from stretto.verify.recommender.cases import Case, cases_from_file, configured_case
from stretto.verify.recommender.every import AllCases, small

if TYPE_CHECKING:
    from stretto.recommender.train.clicks import ClickData
    from stretto.verify.language.every import Impossible
    from stretto.verify.recommender.diagnose import TableVerdict

STEPS = 3  # the second is the first with non-zero states; hash tables evict before the third


class VerifyJob:
    """The placements to verify, and the job to verify them on.

    Attributes:
        config: the job.
        features: the table of each feature.
        cases, impossible: the cases to verify, and the combinations that do not exist.
        clicks: the source of the job's samples; None: samples are random.
    """

    def __init__(
        self,
        config: RecommenderConfig,
        features: Sequence[TableSpec],
        cases: Sequence[Case],
        impossible: Sequence[Impossible] = (),
        clicks: ClickData | None = None,
    ) -> None:
        self.config = config
        self.features = tuple(features)
        self.cases = list(cases)
        self.impossible, self.clicks = list(impossible), clicks

    @classmethod
    def configured(cls, config: RecommenderConfig, file: Path | None = None, quiet: bool = True) -> VerifyJob:
        """The config's placement, or those of a file, on the job's training samples.

        Raises:
            StrettoError: what is wrong with data, placement or file.
        """
        from stretto.recommender.train.clicks import prepare_clicks
        from stretto.recommender.train.placement import place

        clicks = prepare_clicks(config, quiet=quiet)
        case = configured_case(config, clicks.tables, place(config, clicks))
        cases = [case] if file is None else cases_from_file(file, config, clicks.tables, case)
        return cls(config, clicks.tables, cases, (), clicks)

    @classmethod
    def all_cases(cls, config: RecommenderConfig, ranks: int, whole: bool = False) -> VerifyJob:
        """Every placement on `ranks` ranks, on small tables of every kind; `whole`: the full product."""
        made = small(config, ranks)
        tables = made.table_specs()
        every = AllCases(tables, ranks, config.layout.ranks_per_node, whole)
        return cls(made, tables, every.cases, every.impossible)


def verify(
    proposal: VerifyJob,
    steps: int = STEPS,
    on_rank: Callable[[], None] | None = None,
    quiet: bool = True,
) -> list[TableVerdict]:
    """Verifies the cases on as many local ranks as they need.

    Args:
        on_rank: called on every rank first.
        quiet: print no progress.

    Raises:
        StrettoError: more ranks or memory needed than this machine has.
        RankFailed: a rank failed.
    """
    ranks = proposal.cases[0].ranks
    check_ranks(ranks)
    _check_memory(proposal, ranks, steps)
    prepare(PRELOAD)
    with tempfile.TemporaryDirectory(prefix="stretto-verify-") as folder:
        return run_ranks(ranks, _rank, proposal, Path(folder), steps, on_rank, quiet)[0]


def _rank(
    proposal: VerifyJob, folder: Path, steps: int, on_rank: Callable[[], None] | None, quiet: bool
) -> list[TableVerdict]:
    """One rank. Imports inside, so that the parent process need not load torch."""
    import torch
    import torch.distributed as dist

    from stretto.verify.recommender.prove import References, prove

    config = proposal.config
    torch.set_num_threads(config.train.threads)
    warnings.filterwarnings("ignore", message="a cache of")  # growth of too small caches is wanted here
    dist.init_process_group("gloo", timeout=timedelta(seconds=config.train.timeout_s))
    if on_rank is not None:
        on_rank()
    try:
        references = References(config, proposal.features, steps, _data(proposal))
        progress: Any = None if quiet else Progress(len(proposal.cases))
        return prove(references, proposal.cases, folder, progress)
    finally:
        dist.destroy_process_group()


def _data(proposal: VerifyJob) -> Any:
    """The job's training samples."""
    if proposal.clicks is None:
        return None
    from stretto.recommender.train.clicks import open_clicks

    return open_clicks(proposal.config, proposal.clicks, "train")


def _check_memory(proposal: VerifyJob, ranks: int, steps: int) -> None:
    """Checks that the references of all ranks fit in this machine's memory: dense tables, their gradients and
    states in float64.
    """
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return
    tables = sum(8 * table.rows * table.dim for table in physical_tables(proposal.features))
    needed = ranks * tables * (4 * steps + 6)
    if needed > memory:
        raise StrettoError(
            f"proving tables of {tables / 2**30:.1f} GiB in float64 on {ranks} ranks takes about "
            f"{needed / 2**30:.0f} GiB, this machine has {memory / 2**30:.0f}",
            hint="rows are alike: prove it with fewer, such as model.max_rows=10000",
        )
