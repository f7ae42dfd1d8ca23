"""Convert published weights in 8-bit or 4-bit blocks with scales to bfloat16.

8 bits: `X`, float8_e4m3fn, and `X_scale_inv`, float32, one scale per block of 128 x 128 (DeepSeek-V3, arXiv
2412.19437, section 3.3). 4 bits: MXFP4 of gpt-oss, `X_blocks` with two e2m1 values per byte, low half first,
and `X_scales`, a power of two per 32 values (OCP Microscaling Formats, version 1.0).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stretto.engine.checkpoint.huggingface.folder import PublishedTensor, PublishedWeights
from stretto.engine.checkpoint.storage import dtype_name
from stretto.errors import StrettoError

BLOCK = 128  # rows and columns of a block of 8-bit weights, unless config.json sets another size
_SCALE = "_scale_inv"
_BLOCKS = "_blocks"
_SCALES = "_scales"
_GROUP = 32  # MXFP4 values per scale
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127  # of the scales' exponents


class PlainWeights:
    """The tensors of a folder; those in blocks appear under their plain names in bfloat16, and are converted
    when they are read.

    Attributes:
        tensors: file, dtype and shape by name.
        notes: sentences that describe the conversions.

    Raises:
        StrettoError: blocks have no scales, or scales no blocks, or their sizes do not match.
    """

    def __init__(self, published: PublishedWeights, config: Mapping[str, Any]) -> None:
        self._published = published
        self._block = _block_sizes(config)
        self.tensors: dict[str, PublishedTensor] = {}
        self._packed: dict[str, tuple[str, str]] = {}  # names of blocks and scales by the plain name
        scales = set[str]()
        for name, tensor in published.tensors.items():
            if tensor.dtype == torch.float8_e4m3fn:
                self._add(name, name, name + _SCALE)
            elif name.endswith(_BLOCKS) and tensor.dtype == torch.uint8:
                plain = name.removesuffix(_BLOCKS)
                self._add(plain, name, plain + _SCALES)
            elif name.endswith((_SCALE, _SCALES)):
                scales.add(name)
            else:
                self.tensors[name] = tensor
        if alone := scales - {scale for _, scale in self._packed.values()}:
            raise StrettoError(f"{min(alone)} is the scale of no weight", hint="fetch the folder again")
        kinds = {published.tensors[blocks].dtype for blocks, _ in self._packed.values()}
        bits = {torch.float8_e4m3fn: "8-bit blocks (float8_e4m3)", torch.uint8: "4-bit blocks (MXFP4)"}
        self.notes = [f"weights in {bits[kind]} are converted to bfloat16" for kind in kinds]

    def close(self) -> None:
        """Unmap the files."""
        self._published.close()

    def read(self, name: str) -> Tensor:
        """Return a tensor, which must not be modified."""
        if name not in self._packed:
            return self._published.read(name)
        blocks, scales = (self._published.read(each) for each in self._packed[name])
        if blocks.dtype == torch.uint8:
            return from_mxfp4(blocks, scales)
        return from_float8(blocks, scales, self._block)

    def _add(self, name: str, blocks: str, scales: str) -> None:
        packed, scale = self._published.tensors[blocks], self._published.tensors.get(scales)
        if scale is None:
            raise StrettoError(
                f"{blocks} in {packed.file} has type {dtype_name(packed.dtype)} and no {scales}",
                hint="blocks of 8 and 4 bits are read with their scales; import the original weights",
            )
        shape = packed.shape
        if packed.dtype == torch.uint8:
            fits = len(shape) == 4 and shape[-1] == _GROUP // 2 and scale.shape == shape[:-1]
            fits = fits and scale.dtype == torch.uint8
            plain = (shape[0], shape[2] * _GROUP, shape[1]) if fits else ()
        else:
            wanted = tuple(-(-size // block) for size, block in zip(shape, self._block, strict=False))
            fits, plain = len(shape) == 2 and scale.shape == wanted, shape
        if not fits:
            raise StrettoError(
                f"{scales} is {list(scale.shape)}, which does not fit {blocks} of {list(shape)}",
                hint="fetch the folder again",
            )
        self._packed[name] = (blocks, scales)
        self.tensors[name] = PublishedTensor(packed.file, torch.bfloat16, plain)


def from_float8(weight: Tensor, scales: Tensor, block: tuple[int, int] = (BLOCK, BLOCK)) -> Tensor:
    """Multiply each block of a matrix by its scale, and round to bfloat16; blocks at the end of rows and
    columns may be incomplete.
    """
    rows, columns = weight.shape
    plain = torch.empty(rows, columns, dtype=torch.bfloat16)
    wide = scales.float().repeat_interleave(block[1], 1)[:, :columns]
    for at, scale in enumerate(wide):  # a row of blocks at a time, in float32
        rows_of_block = slice(at * block[0], (at + 1) * block[0])
        plain[rows_of_block] = weight[rows_of_block].float() * scale
    return plain


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the experts' matrices, bfloat16, input features first like in gpt-oss's modules.

    Args:
        blocks: bytes, (experts, output features, groups, 16).
        scales: exponents plus 127, (experts, output features, groups).
    """
    experts, outputs, groups, _ = blocks.shape
    values = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=1)  # of a byte, low half first
    plain = torch.empty(experts, groups * _GROUP, outputs, dtype=torch.bfloat16)
    for expert in range(experts):  # one at a time in float32
        numbers = pairs[blocks[expert].int()].flatten(-2)
        scaled = torch.ldexp(numbers, scales[expert].int()[..., None] - _BIAS)
        plain[expert] = scaled.flatten(-2).t()
    return plain


def _block_sizes(config: Mapping[str, Any]) -> tuple[int, int]:
    quantization = config.get("quantization_config")
    sizes = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
    if sizes is None:
        return BLOCK, BLOCK
    if isinstance(sizes, list) and len(sizes) == 2 and all(type(n) is int and n > 0 for n in sizes):
        return sizes[0], sizes[1]
    raise StrettoError(
        f"weight_block_size is {sizes!r} in config.json", hint="two positive integers, such as [128, 128]"
    )
