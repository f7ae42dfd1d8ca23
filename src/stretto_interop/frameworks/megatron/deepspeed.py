"""The JSON that a script of Megatron-DeepSpeed names (`--deepspeed_config`), beside its arguments.

Of what both say DeepSpeed takes the JSON's, but for the optimiser, which the script makes of its arguments
and hands over (`deepspeed.initialize`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from stretto.errors import StrettoError, read_text
from stretto_interop.frameworks.bash import unknown_in
from stretto_interop.frameworks.deepspeed import DEEPSPEED
from stretto_interop.frameworks.fields import RUN_DEFAULTS, reading
from stretto_interop.frameworks.mapping import FileSettings, NamedFile, Start, read_rule, shown

NAME = "deepspeed_config"
_TAKEN = ("batch.", "dp.", "precision.", "train.dtype", "train.bucket_mib", "optim.clip", "optim.rate.")
_SCALE = ("precision.loss_scale", "precision.loss_scale_steps")
# of three sizes two make the third
_SIZES = {"batch.global_size": "train_batch_size", "batch.micro_size": "train_micro_batch_size_per_gpu"}


def read_json(file: NamedFile, values: Mapping[str, Any], mapped: Collection[str]) -> FileSettings:
    """What the JSON says of the run, and where it contradicts the arguments.

    Args:
        values: of fields, as the arguments have them.
        mapped: fields that the arguments name.
    """
    added = FileSettings()
    try:
        text = file.text if file.text is not None else read_text(Path(file.path).expanduser())
        if (name := unknown_in(text)) is not None:
            raise StrettoError(f"nothing tells what {name} is in {file.path}, which the script writes")
        assert DEEPSPEED.parse is not None
        with reading(file.path):
            settings = DEEPSPEED.parse(text, file.path, Start(devices=values["layout.dp"])).settings
    except StrettoError as error:
        added.lost[NAME] = error.message
        return added
    read = set[str]()
    for rule in DEEPSPEED.rules:
        present = [name for name in rule.settings if name in settings and name != "data_parallel_size"]
        if not present or rule.read is None or not rule.fields:
            continue
        read |= set(present)
        try:
            taken = read_rule(rule, settings)
        except StrettoError as error:
            added.lost[f"{NAME} {present[0]}"] = error.message
            continue
        for field, value in taken.items():
            if not field.startswith(_TAKEN) or (field == "optim.clip" and "gradient_clipping" not in present):
                continue
            if field in _SIZES and _SIZES[field] not in present and len(present) < 2:
                continue  # which the arguments say
            added.fields[field] = value
            if field in mapped and values.get(field) != value:
                added.differs[f"{NAME} {field}"] = (
                    f"it is {shown(value)} in {file.path}, which is taken, and {shown(values.get(field))} "
                    "by the arguments"
                )
    if added.fields.get("train.dtype") in ("bfloat16", "float32"):  # which need no scale of the loss
        added.fields |= {name: RUN_DEFAULTS[name] for name in _SCALE if name in values}
    if "optimizer.type" in settings:
        added.differs[f"{NAME} optimizer"] = (
            "the script makes the optimiser of its own arguments: they are taken"
        )
    added.lost |= {
        f"{NAME} {name}": reason
        for name in settings
        if name not in read and (reason := DEEPSPEED.why_unread(name)) is not None
    }
    return added
