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
from stretto.recommender.config.schema import RecommenderConfig
from stretto.recommender.placement import TableSpec
from stretto.run.data.prepare import BuildBar
from stretto.run.launch.stop import StopRequest

if TYPE_CHECKING:
    from stretto.recommender.clicks.batch import ClickSource
    from stretto.recommender.clicks.folder import ClickFolder, HeldOut
    from stretto.recommender.clicks.index import CategoricalFeature, LookupHistogram
    from stretto.recommender.clicks.synthetic.spec import SyntheticSpec


def rank_slice(count: int, rank: int, world: int) -> tuple[int, int]:
    """(start, stop) of a rank's share of `count` samples; the first ranks may have one more."""
    each, more = divmod(count, world)
    start = rank * each + min(rank, more)
    return start, start + each + (rank < more)


@dataclass(frozen=True, kw_only=True)
class ClickData:
    """The prepared clicks of a job.

    Attributes:
        path: the click folder; None for synthetic clicks.
        tables: one for each feature.
        samples, held_out: samples of the log, and how many of them are held out.
        popularity: how often ids are looked up, by feature.
        same: identifies the stream of samples, independent of its location.
        notes: what is held out and why; lines and columns of the log that were not read.
    """

    path: Path | None
    tables: tuple[TableSpec, ...]
    samples: int
    held_out: int
    popularity: dict[str, LookupHistogram]
    same: dict[str, Any]
    notes: tuple[str, ...] = ()


def prepare_clicks(
    config: RecommenderConfig, stop: StopRequest | None = None, quiet: bool = False
) -> ClickData:
    """Opens the click folder, which is built first if the source is files.

    Raises:
        StrettoError: the data is invalid, or does not fit the tables.
        Stopped: the run was asked to stop.
    """
    if config.data.is_synthetic:
        return _synthetic(config)
    from stretto.recommender.clicks.folder import ClickFolder, first_held_out
    from stretto.recommender.clicks.index import TRANSFORM

    path = _folder_of(config, stop, quiet)
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
    trained = first_held_out(folder, _held_out(config, folder))
    same = {
        "samples": index.samples,
        "positives": index.positives,
        "crc32": index.files["labels.bin"].crc32[:1],
        "trained": trained,
        "order": [config.data.shuffle, config.data.block],
        "transform": index.files[TRANSFORM].crc32 if TRANSFORM in index.files else None,
    }
    return ClickData(
        path=path,
        tables=tables,
        samples=folder.samples,
        held_out=folder.samples - trained,
        popularity=_by_table(popular, folder.features, tables),
        same=same,
        notes=(
            _held_out_text(config, folder),
            *folder.notes(),
            *_shared_rows(folder.features, tables),
        ),
    )


def open_clicks(
    config: RecommenderConfig, data: ClickData, split: str, *, shuffle: bool | None = None
) -> ClickSource:
    """The samples of a split: `train`, `valid`, or `all` of a click folder.

    Args:
        shuffle: None: the job's order, in which training samples may be shuffled; False: the log's.

    Raises:
        StrettoError: the split has none.
    """
    if data.path is None:
        from stretto.recommender.clicks.synthetic.log import SyntheticClicks

        return SyntheticClicks(spec_of(config, data.tables), "train" if split == "train" else "valid")
    from stretto.recommender.clicks.folder import ClickFolder, ClickSamples

    shuffled = config.data.shuffle and split == "train" if shuffle is None else shuffle
    folder = ClickFolder(data.path)
    return ClickSamples(
        folder,
        split,
        config.train.seed,
        held_out=_held_out(config, folder),
        shuffle=shuffled,
        block=config.data.block,
    )


def check_held_out(config: RecommenderConfig, data: ClickData) -> None:
    """Raises StrettoError if a split that the run reads has no samples."""
    if config.eval.every is not None and not data.held_out:
        raise StrettoError(
            f"data.split is {config.data.split}, data.valid is {config.data.valid}: of {data.samples} "
            "samples none is held out",
            hint="a larger part, or eval.every=null",
        )
    if data.held_out == data.samples:
        raise StrettoError("all samples are held out, none is left to train on", hint="data.split=share")


def spec_of(config: RecommenderConfig, tables: Sequence[TableSpec]) -> SyntheticSpec:
    """The synthetic log of a job.

    Raises:
        StrettoError: sizes out of range.
    """
    from stretto.recommender.clicks.synthetic.spec import SyntheticFeature, SyntheticSpec

    settings = config.data.synthetic
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
        valid=config.data.valid,
        dense=config.model.numbers,
        base_rate=settings.base_rate,
        strength=settings.strength,
        seed=settings.seed,
    )


def _synthetic(config: RecommenderConfig) -> ClickData:
    from stretto.recommender.clicks.synthetic.log import SyntheticClicks

    tables = tuple(config.table_specs())
    spec = spec_of(config, tables)
    source = SyntheticClicks(spec)
    return ClickData(
        path=None,
        tables=tables,
        samples=spec.samples,
        held_out=spec.held_out,
        popularity=source.popularity(),
        same={"synthetic": _as_json(spec)},
    )


def _as_json(spec: SyntheticSpec) -> dict[str, Any]:
    """The spec after a round trip through JSON."""
    facts: dict[str, Any] = json.loads(json.dumps(spec.as_dict()))
    return facts


def _held_out(config: RecommenderConfig, folder: ClickFolder) -> HeldOut:
    """The held-out part of a click folder."""
    if config.data.split == "last-part":
        return "last-part"
    return "named" if config.data.split == "named" and folder.index.held_parts else config.data.valid


def _held_out_text(config: RecommenderConfig, folder: ClickFolder) -> str:
    """The held-out part of a click folder and the rule that chose it, as printed."""
    held = _held_out(config, folder)
    if isinstance(held, str):
        last = 1 if held == "last-part" else folder.index.held_parts
        names = ", ".join(name for name, _ in folder.index.parts[-last:][:8])
        return (
            f"held out: {names} ({'by name; data.valid is not used' if held == 'named' else 'the last file'})"
        )
    why = "" if config.data.split == "share" else ": no file is held out by its name"
    return f"held out: the last {held:.3g} of the log (data.valid){why}"


def _shared_rows(features: Sequence[CategoricalFeature], tables: Sequence[TableSpec]) -> list[str]:
    """A line that lists tables with fewer rows than their feature has ids."""
    short = [
        f"{table.name} {table.rows:,} for {each.rows:,}"
        for each, table in zip(features, tables, strict=True)
        if each.rows is not None and each.rows > table.rows and table.ids == "modulo"
    ]
    if not short:
        return []
    more = f" and {len(short) - 4} more" if len(short) > 4 else ""
    return [f"tables with fewer rows than ids, which share rows modulo: {', '.join(short[:4])}{more}"]


def _by_table(
    popular: dict[str, LookupHistogram], features: Sequence[Any], tables: Sequence[TableSpec]
) -> dict[str, LookupHistogram]:
    return {table.name: popular[each.name] for each, table in zip(features, tables, strict=True)}


def _folder_of(config: RecommenderConfig, stop: StopRequest | None, quiet: bool) -> Path:
    """The click folder that the config names, or the cached one built from its files."""
    from stretto.recommender.clicks.build import BuildProgress, Settings, build
    from stretto.recommender.clicks.tabular import ColumnNames
    from stretto.run.config.sources import is_click_folder
    from stretto.run.data.build import cache_dir

    data_config = config.data
    if len(data_config.sources) == 1 and is_click_folder(path := Path(data_config.sources[0]).expanduser()):
        return path
    kind = "raw" if data_config.raw else "vocabulary" if data_config.hash_rows is None else "hash"
    settings = Settings(
        kind=kind,
        threshold=data_config.threshold,
        rows=data_config.hash_rows,
        flags=data_config.missing_flags,
        on_error=data_config.on_error,
        split="named" if data_config.split == "named" else "share",
    )
    label = data_config.columns.label
    numbers = data_config.columns.numbers
    features = data_config.columns.features
    columns = ColumnNames(
        label, None if numbers is None else tuple(numbers), None if features is None else tuple(features)
    )
    identity = [sorted(data_config.sources), data_config.format, asdict(settings), asdict(columns)]
    named = hashlib.blake2b(json.dumps(identity).encode(), digest_size=8).hexdigest()
    root = Path(data_config.cache).expanduser() if data_config.cache else cache_dir() / "clicks"
    with BuildBar(quiet, stop) as bar:

        def show(at: BuildProgress) -> None:
            bar.show(at.stage, at.bytes, at.total, f"{at.total / 2**20:.1f} MiB")

        return build(
            data_config.sources,
            root / named,
            settings,
            form=data_config.format,
            columns=columns,
            replace=True,
            progress=show,
        ).path
