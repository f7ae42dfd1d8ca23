"""The clicks of a job: prepares data on disk before ranks start, and opens the samples that ranks read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.errors import StrettoError
from stretto.recommender.config.model import Feature
from stretto.recommender.config.schema import ClickDataConfig, RecommenderConfig
from stretto.recommender.placement import TableSpec
from stretto.run.data.prepare import BuildBar
from stretto.run.launch.stop import StopRequest

if TYPE_CHECKING:
    from stretto.recommender.clicks.batch import ClickSource
    from stretto.recommender.clicks.folder import ClickFolder, HeldOut
    from stretto.recommender.clicks.index import CategoricalFeature, LookupHistogram
    from stretto.recommender.clicks.synthetic.spec import SyntheticSpec


def rank_slice(count: int, rank: int, world: int) -> tuple[int, int]:
    """Return start and stop of a rank's share of `count` samples; the first ranks may have one more."""
    each, more = divmod(count, world)
    start = rank * each + min(rank, more)
    return start, start + each + (rank < more)


@dataclass(frozen=True, kw_only=True)
class ClickData:
    """The prepared clicks of a job.

    Attributes:
        path: the click folder, or None for synthetic clicks.
        tables: one for each feature.
        samples, held_out: samples of the log, and how many of them are held out.
        popularity: how often ids are looked up, by feature.
        identity: identifies the stream of samples, independent of its location.
        settings, seed: how samples are read, and the seed of their order.
        synthetic: what is drawn if `path` is None.
        notes: what is held out and why; lines and columns of the log that were not read.
    """

    path: Path | None
    tables: tuple[TableSpec, ...]
    samples: int
    held_out: int
    popularity: dict[str, LookupHistogram]
    identity: dict[str, Any]
    settings: ClickDataConfig
    seed: int
    synthetic: SyntheticSpec | None = None
    notes: tuple[str, ...] = ()

    def open(self, split: str, *, shuffle: bool | None = None) -> ClickSource:
        """Return the samples of a split: `train`, `valid`, or `all` of a click folder.

        Args:
            shuffle: False for the order of the log; by default training samples may be shuffled.

        Raises:
            StrettoError: the split has none.
        """
        if self.path is None:
            from stretto.recommender.clicks.synthetic.log import SyntheticClicks

            assert self.synthetic is not None, "clicks are read or drawn"
            return SyntheticClicks(self.synthetic, "train" if split == "train" else "valid")
        from stretto.recommender.clicks.folder import ClickFolder, ClickSamples

        folder, settings = ClickFolder(self.path), self.settings
        return ClickSamples(
            folder,
            split,
            self.seed,
            held_out=_held_out(settings, folder),
            shuffle=settings.shuffle and split == "train" if shuffle is None else shuffle,
            block=settings.block,
        )


def prepare_clicks(
    config: RecommenderConfig, stop: StopRequest | None = None, quiet: bool = False
) -> ClickData:
    """Open the click folder, which is built first if the source is files.

    Raises:
        StrettoError: the data is invalid, or does not fit the tables.
        Stopped: the run was asked to stop.
    """
    data, seed = config.data, config.train.seed
    if data.is_synthetic:
        from stretto.recommender.clicks.synthetic.log import SyntheticClicks

        tables = tuple(config.table_specs())
        spec = synthetic_spec(data, config.model.numbers, tables)
        return ClickData(
            path=None,
            tables=tables,
            samples=spec.samples,
            held_out=spec.held_out,
            popularity=SyntheticClicks(spec).popularity(),
            identity={"synthetic": json.loads(json.dumps(spec.as_dict()))},  # as a checkpoint has it
            settings=data,
            seed=seed,
            synthetic=spec,
        )
    from stretto.recommender.clicks.folder import ClickFolder, first_held_out
    from stretto.recommender.clicks.index import TRANSFORM

    path = _prepare_folder(data, stop, quiet)
    folder = ClickFolder(path)
    popular = folder.popularity()
    if len(folder.numbers) != config.model.numbers:
        raise StrettoError(
            f"model.dense is {config.model.numbers}, and {path} has {len(folder.numbers)} numbers a sample",
            hint=f"model.dense={len(folder.numbers)}",
        )
    features = [
        Feature(each.name, each.rows, float(each.hot) if each.hot else popular[each.name].hot)
        for each in folder.features
    ]
    tables = tuple(config.table_specs(features))
    index = folder.index
    trained = first_held_out(folder, _held_out(data, folder))
    identity = {
        "samples": index.samples,
        "positives": index.positives,
        "crc32": index.files["labels.bin"].crc32[:1],
        "trained": trained,
        "order": [data.shuffle, data.block],
        "transform": index.files[TRANSFORM].crc32 if TRANSFORM in index.files else None,
    }
    return ClickData(
        path=path,
        tables=tables,
        samples=folder.samples,
        held_out=folder.samples - trained,
        popularity={
            table.name: popular[each.name] for each, table in zip(folder.features, tables, strict=True)
        },
        identity=identity,
        settings=data,
        seed=seed,
        notes=(
            _held_out_note(data, folder),
            *folder.notes(),
            *_shared_row_notes(folder.features, tables),
        ),
    )


def check_held_out(data: ClickData, *, evaluates: bool) -> None:
    """Raise StrettoError if no sample is left to train on, or to evaluate on if the run does."""
    if evaluates and not data.held_out:
        raise StrettoError(
            f"data.split is {data.settings.split}, data.valid is {data.settings.valid}: of {data.samples} "
            "samples none is held out",
            hint="a larger part, or eval.every=null",
        )
    if data.held_out == data.samples:
        raise StrettoError("all samples are held out, none is left to train on", hint="data.split=share")


def synthetic_spec(data: ClickDataConfig, dense: int, tables: Sequence[TableSpec]) -> SyntheticSpec:
    """Return the synthetic log of a job.

    Args:
        dense: numbers of a sample.

    Raises:
        StrettoError: sizes out of range.
    """
    from stretto.recommender.clicks.synthetic.spec import SyntheticFeature, SyntheticSpec

    settings = data.synthetic
    features = tuple(
        SyntheticFeature(
            name=table.name,
            rows=table.rows,
            hot=table.hot,
            skew=settings.skew if table.skew is None else table.skew,
            varying=settings.varying,
        )
        for table in tables
    )
    return SyntheticSpec(
        features=features,
        samples=settings.samples,
        valid=data.valid,
        dense=dense,
        base_rate=settings.base_rate,
        strength=settings.strength,
        seed=settings.seed,
    )


def _held_out(data: ClickDataConfig, folder: ClickFolder) -> HeldOut:
    """Return the held-out part of a click folder."""
    if data.split == "last-part":
        return "last-part"
    return "named" if data.split == "named" and folder.index.held_parts else data.valid


def _held_out_note(data: ClickDataConfig, folder: ClickFolder) -> str:
    """Return the held-out part of a click folder and the rule that chose it, as printed."""
    part = _held_out(data, folder)
    if isinstance(part, str):
        last = 1 if part == "last-part" else folder.index.held_parts
        names = ", ".join(name for name, _ in folder.index.parts[-last:][:8])
        return (
            f"held out: {names} ({'by name; data.valid is not used' if part == 'named' else 'the last file'})"
        )
    reason = "" if data.split == "share" else ": no file is held out by its name"
    return f"held out: the last {part:.3g} of the log (data.valid){reason}"


def _shared_row_notes(features: Sequence[CategoricalFeature], tables: Sequence[TableSpec]) -> list[str]:
    """Return a line that lists tables with fewer rows than their feature has ids, if there are any."""
    short = [
        f"{table.name} {table.rows:,} for {each.rows:,}"
        for each, table in zip(features, tables, strict=True)
        if each.rows is not None and each.rows > table.rows and table.ids == "modulo"
    ]
    if not short:
        return []
    more = f" and {len(short) - 4} more" if len(short) > 4 else ""
    return [f"tables with fewer rows than ids, which share rows modulo: {', '.join(short[:4])}{more}"]


def _prepare_folder(data: ClickDataConfig, stop: StopRequest | None, quiet: bool) -> Path:
    """Return the click folder that the config names, or the cached one, built from its files."""
    from stretto.recommender.clicks.build import ClickBuildProgress, Settings, build
    from stretto.recommender.clicks.tabular import ColumnNames
    from stretto.run.config.sources import is_click_folder
    from stretto.run.data.build import cache_dir

    if len(data.sources) == 1 and is_click_folder(path := Path(data.sources[0]).expanduser()):
        return path
    kind = "raw" if data.raw else "vocabulary" if data.hash_rows is None else "hash"
    settings = Settings(
        kind=kind,
        threshold=data.threshold,
        rows=data.hash_rows,
        flags=data.missing_flags,
        on_error=data.on_error,
        split="named" if data.split == "named" else "share",
    )
    label = data.columns.label
    numbers = data.columns.numbers
    features = data.columns.features
    columns = ColumnNames(
        label, None if numbers is None else tuple(numbers), None if features is None else tuple(features)
    )
    identity = [sorted(data.sources), data.format, asdict(settings), asdict(columns)]
    key = hashlib.blake2b(json.dumps(identity).encode(), digest_size=8).hexdigest()
    root = Path(data.cache).expanduser() if data.cache else cache_dir() / "clicks"
    with BuildBar(quiet, stop) as bar:

        def show(state: ClickBuildProgress) -> None:
            bar.show(state.stage, state.bytes, state.total, f"{state.total / 2**20:.1f} MiB")

        return build(
            data.sources,
            root / key,
            settings,
            form=data.format,
            columns=columns,
            replace=True,
            progress=show,
        ).path
