"""Proofs of a studio as answers: `stretto verify` as it goes, and its verdict as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from threading import Event
from typing import Any

from stretto.errors import StrettoError
from stretto.web.answers import Answer, Question, Questions
from stretto.web.folder import StudioFolder
from stretto.web.jobs import StudioJob, StudioJobs, config_arguments

_LOOK_S = 0.2  # between two looks at the output
_MOST_LINES = 500  # of the output on the page
_LAYOUTS = {"config": [], "all": ["--layouts", "all"], "product": ["--layouts", "product"]}
# of a layout in float64: the column, and the key of its error
_ERRORS = {
    "loss": "loss_error",
    "gradients": "grad_error",
    "norm": "norm_error",
    "weights": "weight_error",
    "states": "state_error",
    "logits": "predict_error",
}


class Proofs:
    """The questions about proofs.

    Args:
        ended: set when the studio ends.
    """

    def __init__(self, folder: StudioFolder, jobs: StudioJobs, ended: Event) -> None:
        self._folder, self._jobs = folder, jobs
        self._ended = ended
        self.questions: Questions = {
            "verify-start": self.start,
            "verify-stop": self.stop,
            "verify": self.watch,
        }

    def start(self, question: Question) -> Answer:
        """Prove a config of the folder."""
        layouts = question.get("layouts", "config")
        if layouts not in _LAYOUTS:
            raise StrettoError(f"layouts is {layouts!r}", hint=f"one of {', '.join(_LAYOUTS)}")
        arguments = config_arguments(self._folder, question["config"], question.get("overrides"))
        return {"job": self._jobs.start("verify", *arguments, *_LAYOUTS[layouts], "--json").number}

    def stop(self, question: Question) -> Answer:
        """Ask a proof to end."""
        self._jobs.find(question["job"]).stop()
        return {}

    def watch(self, question: Question) -> Iterator[Answer | None]:
        """Yield the proof with its output until it has ended, at last with its verdict; without a number,
        the newest.
        """
        proofs = [job for job in self._jobs if job.kind == "verify"]
        number = question.get("job")
        if number is None and not proofs:
            yield {}
            return
        job = proofs[-1] if number is None else self._jobs.find(number)
        before = -1
        while job.code is None and not self._ended.is_set():
            yield job.record(_MOST_LINES) if job.count != before else None
            before = job.count
            self._ended.wait(_LOOK_S)
        yield {**job.record(_MOST_LINES), **_verdict(job)}


def _verdict(job: StudioJob) -> Mapping[str, Any]:
    """Return the rows of a finished proof, one per layout, and the diagnosis of those that differ."""
    result = job.result()
    if result is None:
        return {}
    layouts = result["layouts"]
    columns = {n: key for n, key in _ERRORS.items() if any(each.get(key) is not None for each in layouts)}
    rows = [["layout", *columns, "bound", "equal", "worst"]]
    for each in layouts:
        errors = [_error(each.get(key)) for key in columns.values()]
        worst = each["worst_gradient"] or each["worst_weight"]
        rows.append([each["layout"], *errors, _error(each["tolerance"]), _yes(each["equal"]), worst])
    rounded = [
        [
            each["layout"],
            each["dtype"],
            quantity["name"],
            _error(quantity["error"]),
            _error(quantity["bound"]),
        ]
        for each in result["own_types"]
        for quantity in each["quantities"]
        if quantity["error"] is not None
    ]
    differing = [each for each in (*layouts, *result["own_types"]) if not each["equal"]]
    return {
        "equal": result["equal"],
        "seconds": result["seconds"],
        "table": rows,
        "own_types": [["layout", "type", "quantity", "error", "bound"], *rounded] if rounded else [],
        "diagnoses": [f"{each['layout']}: {each['diagnosis']}" for each in differing],
        "unseen": result["unseen"],
        "compared": result["compared"],
    }


def _error(error: float | None) -> str:
    return "-" if error is None else f"{error:.1e}"


def _yes(equal: bool) -> str:
    return "yes" if equal else "NO"
