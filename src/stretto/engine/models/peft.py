"""Convert low-rank adapters from and to the files of `peft` (`adapter_config.json`,
`adapter_model.safetensors`).

If a linear of Hugging Face's model consists of n adapted projections, like GPT-2's `c_attn`, its one adapter
has the projections' B on the diagonal and their A stacked by rows, with n times their rank and alpha.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stretto.engine.models.huggingface import rules, to_huggingface
from stretto.errors import StrettoError, nearest
from stretto.job.lora import PROJECTIONS, LoraShape, is_adapter, projection_rows
from stretto.job.parameters import block_shapes, parameter_shapes
from stretto.job.shape import ModelShape

_PREFIX = "base_model.model."
_REFUSED = {  # options that change the function, with the only supported value
    "bias": "none",
    "use_dora": False,
    "modules_to_save": None,
    "layer_replication": None,
    "target_parameters": None,
    "exclude_modules": None,
    "lora_bias": False,
}


@dataclass(frozen=True)
class PeftLinear:
    """One linear of Hugging Face's model, and the plain model's projections in it.

    Attributes:
        hf_name: name in Hugging Face's model, "model.layers.0.self_attn.q_proj".
        block, module: index of the block, and the plain linear's name in it, "attn.qkv".
        projections: name and output features of each projection.
    """

    hf_name: str
    block: int
    module: str
    projections: tuple[tuple[str, int], ...]

    def factor_name(self, projection: str, factor: str) -> str:
        """Return the plain name of A or B of a projection."""
        return f"blocks.{self.block}.{self.module}.lora.{projection}.{factor}.weight"


def linears(shape: ModelShape) -> Iterator[PeftLinear]:
    """Yield the linears of all blocks that may have adapters."""
    base = replace(shape, lora=None)
    # the prefix of names in a model that the rules' names lack
    empty = {name: torch.empty(sizes, device="meta") for name, sizes in parameter_shapes(base).items()}
    first = next(rules(base)).hf_names[0]
    body = min((n.removesuffix(first) for n in to_huggingface(empty, base) if n.endswith(first)), key=len)
    for rule in rules(base):
        first, _, inner = rule.plain_name.removesuffix(".weight").partition(".")
        number, _, module = inner.partition(".")
        if first != "blocks" or module not in PROJECTIONS or not rule.plain_name.endswith(".weight"):
            continue
        kind = shape.block(int(number))
        rows = projection_rows(module, block_shapes(kind)[f"{module}.weight"][0], kind.kv_width)
        named = tuple(zip(PROJECTIONS[module], rows, strict=True))
        hf_names = [body + name.removesuffix(".weight") for name in rule.hf_names if name.endswith(".weight")]
        parts = [named] if len(hf_names) == 1 else [(projection,) for projection in named]
        for name, projections in zip(hf_names, parts, strict=True):
            yield PeftLinear(name, int(number), module, projections)


def to_peft(shape: ModelShape, weights: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the fields of adapter_config.json, and the tensors of adapter_model.safetensors.

    Args:
        weights: the adapters' weights, by their names in the plain model.
    """
    lora = shape.lora
    assert lora is not None, "a model without adapters"
    every, tensors = list(linears(shape)), dict[str, Tensor]()
    adapted, several = list[str](), dict[str, int]()
    for linear in every:
        names = [name for name, _ in linear.projections if linear.factor_name(name, "A") in weights]
        if not names:
            continue
        adapted.append(linear.hf_name)
        tensors[_name(linear, "A")] = torch.cat([weights[linear.factor_name(name, "A")] for name in names])
        tensors[_name(linear, "B")] = _diagonal(linear, names, weights, lora.rank)
        if len(names) > 1:
            several[linear.hf_name.rpartition(".")[2]] = len(names)
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": lora.rank,
        "lora_alpha": _plain(lora.alpha),
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "bias": "none",
        "fan_in_fan_out": any(len(linear.projections) > 1 for linear in every),
        "inference_mode": True,
        "target_modules": _targets([linear.hf_name for linear in every], adapted),
        "rank_pattern": {name: n * lora.rank for name, n in several.items()},
        # the alpha that gives n times the rank the same scale
        "alpha_pattern": {
            name: _plain(lora.alpha * (n**0.5 if lora.rslora else n)) for name, n in several.items()
        },
    }
    return config, tensors


def from_peft(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], shape: ModelShape
) -> tuple[LoraShape, dict[str, Tensor]]:
    """Return the adapters of a model, and their weights by the plain model's names.

    Args:
        config: the fields of adapter_config.json.
        tensors: the tensors of adapter_model.safetensors.
        shape: shape of the base model.

    Raises:
        StrettoError: the plain model cannot have these adapters, or they belong to another base model.
    """
    _check(config)
    rank, alpha = int(config["r"]), float(config["lora_alpha"])
    left, weights = dict(tensors), dict[str, Tensor]()
    for linear in linears(shape):
        a, b = left.pop(_name(linear, "A"), None), left.pop(_name(linear, "B"), None)
        if a is None and b is None:
            continue
        if a is None or b is None:
            raise StrettoError(f"the adapter of {linear.hf_name} lacks one of its factors")
        weights |= _split_factors(linear, a, b, rank)
    if left:
        suggestion = nearest(next(iter(left)), [_name(linear, "A") for linear in linears(shape)])
        raise StrettoError(
            f"adapter weight {next(iter(left))!r} has no place in the model, one of {len(left)}",
            hint=f"is it {suggestion!r}?" if suggestion else "are these the adapters of another model?",
        )
    targets = dict.fromkeys(name.split(".", 2)[2].rpartition(".")[0].rpartition(".")[0] for name in weights)
    lora = LoraShape(
        rank=rank,
        alpha=alpha,
        dropout=float(config.get("lora_dropout") or 0.0),
        targets=tuple(target.replace(".lora.", ".") for target in targets),
        rslora=bool(config.get("use_rslora")),
    )
    expected = parameter_shapes(replace(shape, lora=lora))
    for name, sizes in expected.items():
        if is_adapter(name) and name not in weights:
            raise StrettoError(
                f"the adapters have no {name}: only some blocks are adapted",
                hint="adapters can be imported if all blocks have them",
            )
        if is_adapter(name) and tuple(weights[name].shape) != sizes:
            raise StrettoError(
                f"adapter weight {name!r} is {list(weights[name].shape)}, but {list(sizes)} in the model",
                hint="are these the adapters of another model?",
            )
    return lora, weights


def merged(
    weight: Tensor, module: str, adapters: Mapping[str, Sequence[Tensor]], shape: ModelShape
) -> Tensor:
    """Merge adapters into the weight W [out, in] of a linear: W + scale B A, computed in float32 or wider.

    Args:
        module: the linear's name in its block.
        adapters: A and B of each adapted projection.
        shape: shape of the block.
    """
    assert shape.lora is not None, "a model without adapters"
    exact = torch.promote_types(weight.dtype, torch.float32)
    total, at = weight.to(exact, copy=True), 0
    rows = projection_rows(module, len(weight), shape.kv_width)
    for projection, size in zip(PROJECTIONS[module], rows, strict=True):
        if projection in adapters:
            a, b = adapters[projection]
            total[at : at + size] += shape.lora.scale * (b.to(exact) @ a.to(exact))
        at += size
    return total.to(weight.dtype)


def _name(linear: PeftLinear, factor: str) -> str:
    return f"{_PREFIX}{linear.hf_name}.lora_{factor}.weight"


def _diagonal(linear: PeftLinear, names: Sequence[str], weights: Mapping[str, Tensor], rank: int) -> Tensor:
    """Return B of a linear: the projections' B on the diagonal, zero elsewhere."""
    if len(linear.projections) == 1:
        return weights[linear.factor_name(names[0], "B")]
    first = weights[linear.factor_name(names[0], "B")]
    diagonal = first.new_zeros(sum(rows for _, rows in linear.projections), len(names) * rank)
    at = 0
    for name, rows in linear.projections:
        if name in names:
            column = names.index(name) * rank
            diagonal[at : at + rows, column : column + rank] = weights[linear.factor_name(name, "B")]
        at += rows
    return diagonal


def _split_factors(linear: PeftLinear, a: Tensor, b: Tensor, rank: int) -> dict[str, Tensor]:
    """Split a linear's A [n rank, in] and B [out, n rank] into the factors of its projections."""
    n, remainder = divmod(len(a), rank)
    if remainder or n not in (1, len(linear.projections)) or b.shape[1] != len(a):
        raise StrettoError(
            f"the adapter of {linear.hf_name} has rank {len(a)}, the others {rank}",
            hint="adapters can be imported if all have the same rank (no rank_pattern)",
        )
    weights, at = dict[str, Tensor](), 0
    for number, (name, rows) in enumerate(linear.projections):
        rows_of, column = b[at : at + rows], number * rank if n > 1 else 0
        at += rows
        inside = rows_of[:, column : column + rank]
        if rows_of.count_nonzero() != inside.count_nonzero():
            raise StrettoError(
                f"the adapter of {linear.hf_name} mixes queries, keys and values",
                hint="it can be imported if it has the rank of the others",
            )
        weights[linear.factor_name(name, "A")] = a[column : column + rank].contiguous()
        weights[linear.factor_name(name, "B")] = inside.contiguous()
    return weights


def _check(config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise StrettoError(
            f"peft_type is {config.get('peft_type')!r}", hint="only LoRA adapters can be imported"
        )
    for name, allowed in _REFUSED.items():
        if (value := config.get(name, allowed)) not in (allowed, None, [], {}):
            raise StrettoError(f"adapters with {name}={value!r} are not supported", hint=f"{name}={allowed}")
    for name in ("r", "lora_alpha"):
        value = config.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise StrettoError(f"adapter_config.json has {name} {value!r}", hint="a number above 0")


def _targets(every: Sequence[str], adapted: Sequence[str]) -> list[str]:
    """Return the shortest name suffixes that match exactly the adapted linears."""
    chosen, targets = set(adapted), dict[str, None]()
    for name in adapted:
        parts = name.split(".")
        ends = (".".join(parts[-n:]) for n in range(1, len(parts) + 1))
        matching = {end: [n for n in every if n == end or n.endswith(f".{end}")] for end in ends}
        targets[next(end for end, names in matching.items() if chosen.issuperset(names))] = None
    return list(targets)


def _plain(value: float) -> float:
    return int(value) if value == int(value) else value
