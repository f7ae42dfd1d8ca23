"""The bytes that one stage holds for a microbatch, and its peak while it computes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from stretto.planner.counts.activations import LayerTensor
from stretto.planner.memory.layer import LayerMemory


@dataclass(frozen=True)
class GradientStep:
    """Bytes of weight gradients, of following layers too: once that of a parameter (`mlp.down.weight`) is
    made, while its unit is packed if it is the unit's last, and when the unit's reduction has started.
    """

    parameter: str
    formed: int
    packing: int
    after: int


@dataclass(frozen=True, kw_only=True)
class Resident:
    """Bytes of gathered weights and open gradients while a layer computes.

    Attributes:
        forward: gathered weights in its forward.
        again: the same if the stage's last layer is gathered already.
        loss, backward: gathered weights in the backward of a loss that follows it, and in its backward.
        gradients: weight gradients of the following layers, if backwards make them too.
        steps: those of the layer, in the order in which its backward makes them.
    """

    forward: int = 0
    again: int = 0
    loss: int = 0
    backward: int = 0
    gradients: int = 0
    steps: tuple[GradientStep, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """One stage of one rank, for one microbatch.

    Attributes:
        saved, ends: bytes from the forward on, of blocks, and of embedding, head and loss; without the
            stage's input.
        queued: bytes between I and W.
        lent: the incoming gradient is needed until W, in addition to `queued`.
        boundary: bytes of the activation that it hands on.
        enters, returns: bytes of the activations and of the gradients that it receives, within the decoder of
            an encoder-decoder model also those of the memory, which it hands on as it is.
        forward, backward, split: peak bytes during F, B and I, beyond what is held before.
        again: peak bytes during F if the last layer is gathered already.
        products: peak bytes during W: inputs gathered again, and one weight gradient formed apart.
    """

    saved: int
    ends: int
    queued: int
    lent: bool
    boundary: int
    enters: int
    returns: int
    forward: int
    backward: int
    split: int
    products: int
    again: int


def stage_memory(
    layers: Sequence[LayerMemory],
    boundary: int,
    resident: Sequence[Resident] = (),
    split: Sequence[Resident] = (),
    messages: tuple[int, int] | None = None,
    splits: bool = True,
) -> StageMemory:
    """The memory of a stage.

    Args:
        boundary: bytes of the activation that it hands on.
        messages: bytes of what enters it and of what it sends on, or None for `boundary` each.
        resident: gathered weights and open gradients at each layer.
        split: the same for I, the first half of a split backward.
        splits: its backwards are split; else `split` and `products` are 0.
    """
    enters, returns = messages or (boundary, boundary)
    resident = resident or [Resident()] * len(layers)
    saved = sum(layer.saved for layer in layers if not layer.ends)
    ends = sum(layer.saved for layer in layers if layer.ends)
    input_bytes = layers[0].input_bytes
    last = layers[-1].last_product
    lent = last is not None and last.is_residual
    if layers[0].ends:
        ends -= input_bytes
    else:
        saved -= input_bytes
    # peak bytes of W beyond what it finds in memory. While one product is accumulated, the input of the next
    # is gathered
    products = reversed(layers) if splits else ()
    runs = [[*run] for _, run in groupby(products, id)]  # of equal layers; two of each are enough
    tensors = [tensor for run in runs for layer in run[:2] for tensor in reversed(layer.tensors)]
    following = [*tensors[1:], None][: len(tensors)]
    forward = again = _forward_peak(layers, (of_layer.forward for of_layer in resident))
    if any(of_layer.again != of_layer.forward for of_layer in resident):
        again = _forward_peak(layers, (of_layer.again for of_layer in resident))
    return StageMemory(
        saved=saved,
        ends=ends,
        queued=sum(layer.queued for layer in layers) - boundary * lent,
        lent=lent,
        boundary=boundary,
        enters=enters,
        returns=returns,
        forward=forward - input_bytes,
        backward=_backward_peak(layers, boundary, False, resident),
        split=_backward_peak(layers, boundary, True, split or resident) if splits else 0,
        products=max(
            (
                tensor.regathered + tensor.product + (next_tensor.regathered if next_tensor else 0)
                for tensor, next_tensor in zip(tensors, following, strict=True)
            ),
            default=0,
        ),
        again=again - input_bytes,
    )


def _forward_peak(layers: Sequence[LayerMemory], resident: Iterable[int]) -> int:
    """Peak bytes of the forward, the stage's input included."""
    size = peak = 0
    for layer, others in zip(layers, resident, strict=True):
        peak = max(peak, size + layer.forward_peak + others)
        size += layer.saved
    return peak


def _backward_peak(
    layers: Sequence[LayerMemory], boundary: int, split: bool, resident: Sequence[Resident]
) -> int:
    """Peak bytes of B or I, beyond what is held before it."""
    moved = peak = 0  # bytes now, minus the bytes at the start
    each = list(zip(reversed(layers), reversed(resident), strict=True))
    index = 0
    while index < len(each):
        # equal layers in a row move equally many bytes, so that the first or the last has the peak
        layer, layer_resident = each[index]
        end = index + 1
        while index and end < len(each) and each[end][0] is layer and each[end][1] == layer_resident:
            end += 1
        of_layer, change = _layer_backward(layer, layer_resident, boundary, split, not index)
        peak = max(peak, moved + of_layer, moved + of_layer + (end - index - 1) * change)
        moved += (end - index) * change
        index = end
    return peak


def _layer_backward(
    layer: LayerMemory, resident: Resident, boundary: int, split: bool, last: bool
) -> tuple[int, int]:
    """The peak of one layer's B or I, and the change of what is held, both beyond what is held before it.

    Args:
        last: the layer is the stage's last, with which the backward begins.
    """
    moved = peak = 0
    gradients, steps = resident.gradients, [*resident.steps]
    incoming = 0 if last else boundary  # the gradient from the following layer
    # the tensors from the last to the first: saved ones one by one, recomputed neighbours as a group
    groups = list[list[LayerTensor]]()
    for tensor in reversed(layer.tensors):
        if groups and not tensor.saved and not groups[-1][0].saved:
            groups[-1].insert(0, tensor)
        else:
            groups.append([tensor])
    for group in groups:
        again = 0 if group[0].saved else boundary  # the output of the recomputed forward
        for tensor in group if again else ():
            again += tensor.bytes
            others = resident.backward + gradients
            peak = max(peak, moved + incoming + again + others + tensor.forward)
        for tensor in reversed(group):
            regathered, product = (0, 0) if split else (tensor.regathered, tensor.product)
            formed, packing = gradients, 0
            linear = tensor.name.removesuffix(" input")
            multiplies = tensor.held_until_w is not None or linear == "out"
            while multiplies and any(step.parameter.startswith(linear) for step in steps):
                step = steps.pop(0)
                formed, packing = max(formed, step.formed), max(packing, step.packing)
                gradients = step.after
            # losses of some tokens at a time pack their gradient when all are done, beside the input's
            packing += boundary if tensor.held_until_w is None else tensor.backward + regathered
            others = resident.loss if tensor.name.startswith("loss") else resident.backward
            others += moved + incoming + again
            peak = max(peak, others + formed + tensor.backward + product + regathered, others + packing)
            if split and tensor.held_until_w is not None:
                moved += tensor.held_until_w + (0 if tensor.saved else tensor.bytes)
                if tensor.is_residual:  # counted already, as incoming or as a neighbour's temporary
                    first = tensor is layer.last_product
                    moved -= boundary if last and first else 0
                    incoming = -boundary * (not first)
            elif tensor.saved:
                moved -= tensor.bytes
            if not tensor.saved:
                again -= tensor.bytes
    for step in steps:
        peak = max(peak, moved + resident.backward + step.packing)
    return peak, moved
