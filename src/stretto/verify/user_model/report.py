"""The result of a proof of any model: how far each quantity is off, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stretto.verify.compare import Quantity


class Differs(AssertionError):
    """A parallel model does not compute what the plain one does. `report` says how far off it is, and why."""

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.report,)


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of `prove`.

    quantities: loss, gradients, norm, weights, states, buffers.
    diagnosis: the likeliest cause of a difference; None if all is equal.
    first_module: the first module whose output differs, in the order of the forward; None if none does.
    notes: what was changed for the proof, or not compared.
    """

    ranks: int
    steps: int
    dtype: str
    quantities: Sequence[Quantity]
    diagnosis: str | None
    first_module: str | None
    notes: Sequence[str]
    seconds: float

    @property
    def equal(self) -> bool:
        """True if the parallel model computes what the plain one does."""
        return self.diagnosis is None and all(quantity.equal for quantity in self.quantities)

    @property
    def worst(self) -> str | None:
        """The parameter that is farthest off, in the first quantity that differs."""
        return next((quantity.worst for quantity in self.quantities if not quantity.equal), None)

    def __getitem__(self, name: str) -> Quantity:
        """Return a quantity by its name."""
        return next(quantity for quantity in self.quantities if quantity.name == name)

    def raise_for_difference(self) -> None:
        """Raise Differs, with this report as its text, unless all is equal."""
        if not self.equal:
            raise Differs(self)

    def __str__(self) -> str:
        rows = [("", "error", "bound", "worst", "equal")]
        for quantity in self.quantities:
            error = "-" if quantity.error is None else f"{quantity.error:.1e}"
            equal = "-" if quantity.error is None else "yes" if quantity.equal else "NO"
            rows.append((quantity.name, error, f"{quantity.bound:.1e}", quantity.worst or "-", equal))
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = [
            f"largest relative difference from one process, {self.dtype}, {self.steps} "
            f"step{'s' * (self.steps > 1)}",
            *("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows),
        ]
        if self.diagnosis:
            lines.append(self.diagnosis)
        lines += [f"note: {note}" for note in self.notes]
        verdict = "all equal to one process" if self.equal else "DIFFERS from one process"
        lines.append(f"{self.ranks} rank{'s' * (self.ranks > 1)} in {self.seconds:.1f} s, {verdict}")
        compared = [quantity.name for quantity in self.quantities if quantity.error is not None]
        # a model without buffers lacks nothing
        missing = [
            quantity.name
            for quantity in self.quantities
            if quantity.error is None and quantity.name != "buffers"
        ]
        lines += [
            f"compared with the plain model in one process: {', '.join(compared)}",
            "shared with it: code of its layers, initial values, batches, and the optimizer's rule",
            "not seen by this proof: " + ", ".join([*(f"the {name}" for name in missing), *UNSEEN]),
        ]
        return "\n".join(lines)


UNSEEN = ("mistakes of what is shared", "dropout's masks", "steps after these")
