"""The proof of a language model's layouts: its cases, samples and memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from stretto.job.devices import HOST
from stretto.job.job import Job
from stretto.job.parameters import parameter_shapes
from stretto.run.config.check import check
from stretto.run.config.device_checks import compiler_problems
from stretto.run.config.run_checks import raise_first
from stretto.run.config.schema import TrainConfig
from stretto.run.data.prepare import check_samples, prepare_data
from stretto.run.data.sentinels import job_of_text
from stretto.run.launch.local import check_ranks, prepare
from stretto.run.train.language_job import check_attention
from stretto.run.train.launch import PRELOAD
from stretto.verify.language.cases import cases_from_file, configured_job, describe, smaller
from stretto.verify.language.every import Every
from stretto.verify.language.fields import with_effect, without_effect, without_ranks
from stretto.verify.run import Findings, Impossible, Proof

if TYPE_CHECKING:
    from stretto.run.data.dataset import Batch
    from stretto.run.data.token_source import TokenData
    from stretto.verify.evidence import Verdict
    from stretto.verify.language.precision import OneProcess
    from stretto.verify.language.reference import Trial

# what updates the reference (`verify/optimizer.py`), by the job's optimiser
_UPDATED_BY = {
    "adamw": "torch.optim.AdamW",
    "sgd": "torch.optim.SGD",
    "adafactor": "torch.optim.Adafactor",
    "lamb": "LAMB's formula",
    "muon": "Muon's formula and torch.optim.AdamW",
}
_COPIES = 4  # float64 copies of the model on a rank: weights, gradients, two optimiser states
_STEPS = {False: 3, True: 2}  # of a few layouts, and of each of all


@dataclass(kw_only=True)
class LanguageProof(Proof):
    """Layouts of a language model.

    Attributes:
        config: of the job: its data, seed and steps are used.
        cases: of the model that the data's vocabulary makes.
        fields: look for fields of the job that the proof does not see.
        retyped: the cases in the job's own types, which are compared with one process in them.
        twice: make the steps both as messages come, and with every message late, and compare the bits; else
            with every message late.
    """

    noun: ClassVar[str] = "layout"
    preload: ClassVar[tuple[str, ...]] = PRELOAD
    config: TrainConfig
    cases: Sequence[Job]
    source: TokenData
    fields: bool
    retyped: Sequence[Job] = ()
    twice: bool

    def needed_memory(self) -> tuple[float, str, str]:
        """Count the snapshots of every step, and each rank's share of the model."""
        model = 8 * sum(map(prod, parameter_shapes(self.cases[0].shape).values()))
        share = max(_COPIES / (case.layout.tp * case.layout.pp) for case in self.cases)
        needed = model * (self.ranks * (2 * (self.steps + 1) + share) + _COPIES)
        return (
            needed,
            f"proving this model in float64 on {self.ranks} ranks",
            "layers are alike: prove it with fewer and narrower ones, such as model.layers=2",
        )

    def trial(self) -> Trial:
        """The samples that all cases train on, read from the data."""
        from stretto.verify.language.reference import Trial

        return Trial(
            batches=batches(self.config, self.source, self.steps + 1),
            seed=self.config.train.seed,
            total_steps=self.config.train.steps,
            twice=self.twice,
            timeout=self.timeout,
        )

    def run_alone(self, folder: Path) -> list[OneProcess]:
        """Train each case in one process, in the job's own types."""
        from stretto.verify.language.precision import run_one_process

        trial = self.trial() if self.retyped else None
        return [run_one_process(case, trial) for case in self.retyped if trial is not None]

    def find(
        self, alone: list[OneProcess] | None, folder: Path, report: Callable[[Verdict, int], None]
    ) -> Findings:
        """Compare the layouts."""
        from stretto.verify.language.precision import prove_layout_rounded
        from stretto.verify.language.prove import prove

        trial = self.trial()
        findings = Findings(prove(self.cases, trial, report))
        if self.fields:
            findings.unproved = without_effect(self.cases[0], trial)
        right = {verdict.layout for verdict in findings.verdicts if verdict.equal}
        for number, case in enumerate(self.retyped):
            if describe(case) in right:  # what differs in float64 is explained already
                findings.rounded.append(prove_layout_rounded(case, trial, alone[number] if alone else None))
        return findings


def proof_of(
    config: TrainConfig,
    layouts: str | None,
    *,
    ranks: int | None,
    steps: int | None,
    precision: bool | None,
    quiet: bool,
) -> LanguageProof:
    """The proof that `stretto verify` makes.

    Args:
        layouts: "all", "product" or a file of layouts; None: the config's own.
        ranks: of "all" and "product"; None: those of the config's layout.
        precision: compare in the job's own types too; None: yes, unless `layouts` is "all" or "product".

    Raises:
        StrettoError: bad input.
    """
    check(config)
    check_attention(config.train.attention, HOST)
    if layouts not in ("all", "product"):
        cases = [configured_job(config)] if layouts is None else cases_from_file(Path(layouts), config)
        steps = steps or _STEPS[False]
        both = precision is not False
        return language_proof(config, cases, steps, twice=True, fields=True, own_types=both, quiet=quiet)
    world = ranks or config.layout.to_layout().world
    config = smaller(config, world)
    check_ranks(world)
    every = Every(configured_job(config), world, full=layouts == "product")
    impossible = [*every.impossible, *without_ranks(every.cases)]
    steps = steps or _STEPS[True]
    return language_proof(
        config,
        every.cases,
        steps,
        impossible=impossible,
        fields=True,
        own_types=precision is True,
        quiet=quiet,
    )


def in_own_types(case: Job, job: Job) -> Job | str:
    """The layout in the types that `job` trains in, or why it is compared in float64 alone."""
    precision = job.precision
    optimiser = replace(case.optimiser, states=job.optimiser.states)
    typed = replace(case, precision=precision, optimiser=optimiser)
    if typed.program().versions:
        return "updates within the step are compared in float64 alone"
    if precision.half and typed.shape.moe is not None:
        return f"in {precision.dtype} rounding decides to which experts some tokens go"
    return "the job trains in float64" if precision.dtype == "float64" else typed


def language_proof(
    config: TrainConfig,
    cases: Sequence[Job],
    steps: int = 2,
    twice: bool = False,
    impossible: Sequence[Impossible] = (),
    fields: bool = False,
    own_types: bool = False,
    quiet: bool = True,
) -> LanguageProof:
    """The proof of these layouts, all for one number of ranks, with the data prepared.

    Args:
        steps: training steps of each with nothing read between them; one more is made whose gradients are
            read.
        fields: also look for fields of the job that the proof does not see.
        own_types: compare in the job's own types too.
        quiet: print nothing on the way.

    Raises:
        StrettoError: bad text, or more ranks needed than this machine has.
    """
    ranks = cases[0].layout.world
    check_ranks(ranks)
    if (compile := cases[0].compile) != "off":
        raise_first([*compiler_problems(compile, HOST)])
    prepare(PRELOAD)  # it imports torch while this process looks at the data
    source = prepare_data(config.data, config.vocab, quiet=quiet)
    job = job_of_text(config, source)
    shape, notes = with_effect(job.shape, config.data.sequence)
    check_samples(source, config.data, job, evaluates=config.eval.every is not None)
    cases = [replace(case, shape=shape) for case in cases]
    retyped = [in_own_types(case, job) for case in cases] if own_types else []
    return LanguageProof(
        config=config,
        cases=cases,
        retyped=[case for case in retyped if isinstance(case, Job)],
        float64_only=sorted({reason for reason in retyped if isinstance(reason, str)}),
        source=source,
        fields=fields,
        twice=twice,
        ranks=ranks,
        threads=config.train.threads,
        timeout=timedelta(seconds=config.train.timeout_s),
        steps=steps,
        impossible=impossible,
        notes=notes,
        updated_by=_UPDATED_BY.get(config.optim.name, f"{config.optim.name} on whole parameters"),
    )


def batches(config: TrainConfig, source: TokenData, steps: int) -> list[Batch]:
    """The first global batches of the training split: what `stretto train` sees, but with an edge in most of
    the samples that would be inside one document where documents are kept apart, and with padding after most
    of those that an encoder reads. Proofs have few and short samples, and without these they would not see
    what mixes documents up, or attends to padding.
    """
    from stretto.run.data.mixture import training_samples

    samples = training_samples(source, config.data, job_of_text(config, source), config.train.seed)
    size = config.batch.global_size
    wanted = [range(step * size, (step + 1) * size) for step in range(steps)]
    return [_with_padding(_with_edges(samples.batch(indices), indices), indices) for indices in wanted]


def _with_padding(batch: Batch, indices: range) -> Batch:
    """Three of four samples of an encoder with other numbers of real tokens."""
    import torch

    if batch.decoder is None or batch.lengths is not None:
        return batch
    tokens = batch.inputs.shape[1]
    lengths = [tokens - (3 * index % tokens if index % 4 else 0) for index in indices]
    return replace(batch, lengths=torch.tensor(lengths, dtype=torch.int64))


def _with_edges(batch: Batch, indices: range) -> Batch:
    """Three of four samples of one document cut in two, each in another place."""
    from stretto.engine.models.language import IGNORED

    if batch.begins is None:
        return batch
    begins, targets = batch.begins.clone(), batch.targets.clone()
    last = begins.shape[1] - 1
    for row, index in enumerate(indices):
        if last > 0 and index % 4 and not begins[row].any():
            edge = 1 + 7 * index % last
            begins[row, edge:], targets[row, edge - 1] = edge, IGNORED
    return replace(batch, begins=begins, targets=targets)
