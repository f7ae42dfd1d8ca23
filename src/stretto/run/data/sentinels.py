"""The ids that a denoising objective writes between tokens of text: sentinels, the end and the start."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.errors import Problem, StrettoError
from stretto.job.job import Job
from stretto.run.config.data import DataConfig
from stretto.run.config.denoising import Corruption, Denoising
from stretto.run.config.job import job_of
from stretto.run.config.schema import TrainConfig
from stretto.run.data.token_source import TokenData

_MASKS = ("<mask>", "[MASK]")


@dataclass(frozen=True, kw_only=True)
class SentinelIds:
    """Ids of tokens that stand for no text.

    spans: the ids that replace the spans, in order: sentinels, or the same mask for all.
    end: the id after the last token of inputs and targets.
    start: the id before the first token of the decoder.
    """

    spans: tuple[int, ...]
    end: int
    start: int


def vocabulary(source: TokenData, data: DataConfig, corruption: Corruption | None) -> int:
    """Return the number of entries of the vocabulary of a model that is trained on the source: the
    tokenizer's, and the sentinels that it lacks.
    """
    if corruption is None or data.first_sentinel is not None or _own_marks(source, corruption, 1):
        return source.vocab
    return source.vocab + data.marks(corruption)


def job_of_text(config: TrainConfig, source: TokenData) -> Job:
    """Return the config's job, with the vocabulary that its text makes."""
    return job_of(config, vocab=vocabulary(source, config.data, config.corruption))


def sentinel_ids(source: TokenData, data: DataConfig, lengths: Denoising, rows: int) -> SentinelIds:
    """Return the ids for a source: sentinels from `data.first_sentinel` downwards, else the tokenizer's own
    `<extra_id_0>`, `<extra_id_1>`, ..., else the last of the vocabulary, downwards; a mask likewise.

    Args:
        rows: number of entries of the model's vocabulary.

    Raises:
        StrettoError: no end of text is known; the vocabulary has no room for the ids.
    """
    corruption, spans = lengths.corruption, lengths.spans
    if source.endoftext is None:
        raise StrettoError(
            f"{source.name}: no end of text is known, and samples of {corruption} end with it",
            hint="name the tokenizer with data.tokenizer=FILE, or the token with data.end_of_text=TOKEN",
        )
    first, needed = data.first_sentinel, 1 if corruption == "infilling" else spans
    marks = None if first is not None else _own_marks(source, corruption, needed)
    if marks is not None:
        ids = marks
    else:
        _check_room(source, data, rows=rows, needed=needed, spans=spans)
        top = rows - 1 if first is None else first
        ids = range(top, top - needed, -1)
    start = None  # T5's decoder starts with the padding, BART's with the end
    if corruption == "span-corruption" and source.fingerprint is not None:
        start = source.tokenizer().special("<pad>")
    return SentinelIds(
        spans=tuple(ids) * (spans // len(ids)),
        end=source.endoftext,
        start=source.endoftext if start is None else start,
    )


def _own_marks(source: TokenData, corruption: Corruption, needed: int) -> list[int] | None:
    """Return the first sentinels of the tokenizer itself, or None if it has none, or is unknown.

    Raises:
        Problem: it has fewer than are needed.
    """
    if source.fingerprint is None:
        return None
    special = source.tokenizer().special
    if corruption == "infilling":
        return next(([id_] for mask in _MASKS if (id_ := special(mask)) is not None), None)
    ids = list[int]()
    while len(ids) < needed and (id_ := special(f"<extra_id_{len(ids)}>")) is not None:
        ids.append(id_)
    if ids and len(ids) < needed:
        raise Problem(
            "data.sequence",
            None,
            f"its samples have {needed} spans, and the tokenizer has {len(ids)} sentinels, <extra_id_0> to "
            f"<extra_id_{len(ids) - 1}>",
            "a shorter data.sequence, a longer data.mean_span_length, or data.first_sentinel=ID with others",
        )
    return ids or None


def _check_room(source: TokenData, data: DataConfig, *, rows: int, needed: int, spans: int) -> None:
    """Check that the vocabulary holds the sentinels: if they are named, that they are ids; else, that they
    are none of the text's.
    """
    first = data.first_sentinel
    if first is not None:
        if first >= rows or first - needed + 1 < 0:
            rule = f"{needed} sentinels go from it downwards, in a vocabulary of {rows}"
            raise Problem("data.first_sentinel", first, rule, f"data.first_sentinel={rows - 1}")
    elif rows - source.vocab < needed:
        room = max(0, rows - source.vocab)
        raise Problem(
            "model.vocab",
            rows,
            f"samples of {spans} span{'s' * (spans > 1)} take {needed} ids beside the tokenizer's "
            f"{source.vocab}, and {room} are left",
            f"model.vocab={source.vocab + needed}, or null with data.sentinels={needed} or more",
        )
