"""Embedding lookups, gradients, fused optimiser updates and initial values, compiled by numba."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from stretto.engine.loops import jit
from stretto.recommender.tables.splitmix import FIRST, GOLDEN, SECOND

_A = Any  # an array or a number, typed by numba
_intrinsic: Any = intrinsic
_U = np.uint64
_U0 = _U(0)
_U1 = _U(1)
_LINE = _U(64)
_AHEAD = _U(8)  # prefetch distance in lookups or rows
_DIGIT = 11  # bits per radix sort pass, whose counters must fit in L1


class Lookups(NamedTuple):
    """The lookups that contribute to the gradient of each row.

    Attributes:
        gradient: flat, of the bags.
        bag_offsets: [n], the offset in `gradient` of each lookup's bag.
        order, starts: as in `plain.Grouped`.
        scale: [n], or empty if all are 1.
        mean_square: [u], mean squares over all columns of the table; empty if `gradient` has all columns.
    """

    gradient: Any
    bag_offsets: Any
    order: Any
    starts: Any
    scale: Any
    mean_square: Any


@_intrinsic
def _touch(typing: Any, array: Any, index: Any) -> Any:
    """Prefetch the cache line of array[index]."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        word = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [ir.PointerType(), word, word, word])
        name = "llvm.prefetch.p0"
        function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        read, locality, is_data = (ir.Constant(word, value) for value in (0, 3, 1))
        builder.call(function, [builder.gep(data, [arguments[1]]), read, locality, is_data])
        return context.get_dummy_value()

    return types.void(array, types.uintp), generate


@_intrinsic
def _value(typing: Any, x: Any) -> Any:
    """A float unchanged; a bfloat16, passed as uint16, as float32."""
    if isinstance(x, types.Float):
        return x(x), lambda context, builder, signature, arguments: arguments[0]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = builder.zext(arguments[0], ir.IntType(32))
        return builder.bitcast(builder.shl(word, ir.Constant(word.type, 16)), ir.FloatType())

    return types.float32(types.uint16), generate


@_intrinsic
def _join(typing: Any, upper: Any, lower: Any) -> Any:
    """The float32 of two uint16. (numba's own shift would widen them to 64 bits.)"""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        high, low = (builder.zext(half, ir.IntType(32)) for half in arguments)
        return builder.bitcast(
            builder.or_(builder.shl(high, ir.Constant(high.type, 16)), low), ir.FloatType()
        )

    return types.float32(types.uint16, types.uint16), generate


def _half(shift: int) -> Any:
    """The 16 bits of a float32 from bit `shift` on."""

    def half(typing: Any, x: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            word = builder.bitcast(arguments[0], ir.IntType(32))
            return builder.trunc(builder.lshr(word, ir.Constant(word.type, shift)), ir.IntType(16))

        return types.uint16(types.float32), generate

    return _intrinsic(half)


_upper, _lower = _half(16), _half(0)


@jit(inline=True)
def _prefetch(array: _A, at: _A, width: _A) -> None:
    for j in range(_U0, width * _U(array.itemsize), _LINE):
        _touch(array, at + j // _U(array.itemsize))


@jit
def lookup(
    weight: _A, width: _A, slots: _A, rows: _A, offsets: _A, scale: _A, out: _A, first: _A, last: _A
) -> Any:
    """Fill bags [first, last) of `out` with the sum of their rows, times `scale` unless that is empty.

    Returns:
        The first lookup whose row is out of range (`slots` or more); -1 if there is none.
    """
    count, scaled = _U(len(rows)), len(scale) > 0
    for bag in range(_U(first), _U(last)):
        begin = _U(offsets[bag])
        end = _U(offsets[bag + _U1])
        to = bag * width
        if begin == end:
            for j in range(width):
                out[to + j] = 0
        for k in range(begin, end):
            if k + _AHEAD < count:
                _prefetch(weight, _U(rows[k + _AHEAD]) * width, width)
            row = _U(rows[k])
            if row >= slots:
                return np.int64(k)
            at = row * width
            factor = out.dtype.type(1)
            if scaled:
                factor = out.dtype.type(scale[k])
            if k == begin:
                for j in range(width):
                    out[to + j] = factor * out.dtype.type(_value(weight[at + j]))
            else:
                for j in range(width):
                    out[to + j] += factor * out.dtype.type(_value(weight[at + j]))
    return np.int64(-1)


@jit
def fill_bag_offsets(offsets: _A, width: _A, bag_offsets: _A) -> None:
    """Fill `bag_offsets` [n] with the offset of each lookup's bag in the flat sums."""
    for bag in range(_U(len(offsets)) - _U1):
        at = np.int64(bag * width)
        for k in range(_U(offsets[bag]), _U(offsets[bag + _U1])):
            bag_offsets[k] = at


@jit
def group(rows: _A, lowest: _A, highest: _A, keys: _A, scratch: _A) -> Any:
    """Sort lookups by row, stably: an LSD radix sort of (row, lookup) packed into one 64-bit key.

    Args:
        rows: [n], fewer than 2^32, all in [lowest, highest], less than 2^32 apart.
        keys, scratch: [n] or more uint64, scratch buffers.

    Returns:
        (rows [u], order [n], starts [u + 1]), as `plain.Grouped`.
    """
    count = _U(len(rows))
    bits = 1
    while (highest - lowest) >> bits:
        bits += 1
    passes = (bits + _DIGIT - 1) // _DIGIT
    digit = (bits + passes - 1) // passes
    mask = _U((1 << digit) - 1)
    begins = np.zeros((passes, 1 << digit), np.int64)
    for i in range(count):
        row = _U(rows[i] - lowest)
        keys[i] = (row << _U(32)) | i
        for p in range(passes):
            begins[p, (row >> _U(p * digit)) & mask] += 1
    for p in range(passes):
        begin = begins[p]
        shift = _U(32 + p * digit)
        total = 0
        for d in range(len(begin)):
            size = begin[d]
            begin[d] = total
            total += size
        for i in range(count):
            d = (keys[i] >> shift) & mask
            scratch[_U(begin[d])] = keys[i]
            begin[d] += 1
        keys, scratch = scratch, keys
    order, unique = np.empty(count, np.int64), np.empty(count, np.int64)
    starts = np.empty(count + _U1, np.int64)
    groups = _U0
    for i in range(count):
        row, k = keys[i] >> _U(32), keys[i] & _U(0xFFFFFFFF)
        order[i] = k
        if i == _U0 or row != keys[i - _U1] >> _U(32):
            unique[groups], starts[groups] = np.int64(row) + lowest, i
            groups += _U1
    starts[groups] = count
    return unique[:groups], order, starts[: groups + _U1]


@jit(inline=True)
def _sum_of(sums: _A, width: _A, of: _A, i: _A) -> None:
    """Fill `sums` with the gradient of the i-th row, over its lookups in order."""
    count, scaled = _U(len(of.order)), len(of.scale) > 0
    begin = _U(of.starts[i])
    for k in range(begin, _U(of.starts[i + _U1])):
        if k + _AHEAD < count:
            _prefetch(of.gradient, _U(of.bag_offsets[_U(of.order[k + _AHEAD])]), width)
        bag = _U(of.order[k])
        at = _U(of.bag_offsets[bag])
        factor = sums.dtype.type(1)
        if scaled:
            factor = sums.dtype.type(of.scale[bag])
        if k == begin:
            for j in range(width):
                sums[j] = factor * of.gradient[at + j]
        else:
            for j in range(width):
                sums[j] += factor * of.gradient[at + j]


@jit
def segment_sum(out: _A, width: _A, of: _A, first: _A, last: _A) -> None:
    """Fill out[i] with the gradient of row i, for rows [first, last)."""
    sums = np.empty(width, of.gradient.dtype)
    for i in range(_U(first), _U(last)):
        _sum_of(sums, width, of, i)
        at = i * width
        for j in range(width):
            out[at + j] = sums[j]


@jit
def squares(out: _A, width: _A, of: _A, first: _A, last: _A) -> None:
    """Fill out[i] with the sum of squares of the gradient of row i, for rows [first, last)."""
    sums = np.empty(width, of.gradient.dtype)
    for i in range(_U(first), _U(last)):
        _sum_of(sums, width, of, i)
        total = of.gradient.dtype.type(0)
        for j in range(width):
            total += sums[j] * sums[j]
        out[i] = total


@jit
def sgd(weight: _A, states: _A, width: _A, rows: _A, of: _A, numbers: _A, first: _A, last: _A) -> None:
    """As `rules.Sgd`. numbers: lr, factor of the gradient."""
    sums = np.empty(width, of.gradient.dtype)
    rate = weight.dtype.type(numbers[0] * numbers[1])
    for i in range(_U(first), _U(last)):
        if i + _AHEAD < _U(last):
            _prefetch(weight, _U(rows[i + _AHEAD]) * width, width)
        _sum_of(sums, width, of, i)
        at = _U(rows[i]) * width
        for j in range(width):
            weight[at + j] -= rate * sums[j]


@jit
def adagrad(weight: _A, states: _A, width: _A, rows: _A, of: _A, numbers: _A, first: _A, last: _A) -> None:
    """As `rules.Adagrad`. numbers: lr, factor, eps."""
    (total,) = states
    sums = np.empty(width, of.gradient.dtype)
    kind = weight.dtype.type
    rate = kind(numbers[0])
    factor = kind(numbers[1])
    eps = kind(numbers[2])
    for i in range(_U(first), _U(last)):
        if i + _AHEAD < _U(last):
            ahead = _U(rows[i + _AHEAD]) * width
            _prefetch(weight, ahead, width)
            _prefetch(total, ahead, width)
        _sum_of(sums, width, of, i)
        at = _U(rows[i]) * width
        for j in range(width):
            g = factor * sums[j]
            square = total[at + j] + g * g
            total[at + j] = square
            weight[at + j] -= rate * g / (np.sqrt(square) + eps)


@jit
def rowwise_adagrad(
    weight: _A, states: _A, width: _A, rows: _A, of: _A, numbers: _A, first: _A, last: _A
) -> None:
    """As `rules.RowwiseAdagrad`. numbers: lr, factor, eps."""
    (total,) = states
    sums = np.empty(width, of.gradient.dtype)
    kind = weight.dtype.type
    rate, eps = kind(numbers[0] * numbers[1]), kind(numbers[2])
    mean = kind(numbers[1] * numbers[1] / width)
    has_means = len(of.mean_square) > 0
    for i in range(_U(first), _U(last)):
        if i + _AHEAD < _U(last):
            ahead = _U(rows[i + _AHEAD])
            _prefetch(weight, ahead * width, width)
            _touch(total, ahead)
        _sum_of(sums, width, of, i)
        square = kind(0)
        if has_means:
            square = kind(of.mean_square[i])
        else:
            for j in range(width):
                square += sums[j] * sums[j]
            square *= mean
        row = _U(rows[i])
        total[row] += square
        scaled = rate / (np.sqrt(total[row]) + eps)
        at = row * width
        for j in range(width):
            weight[at + j] -= scaled * sums[j]


@jit
def lazy_adam(weight: _A, states: _A, width: _A, rows: _A, of: _A, numbers: _A, first: _A, last: _A) -> None:
    """As `rules.LazyAdam`. numbers: lr, factor, beta1, beta2, eps."""
    mean, square, times = states
    lr, _, beta1, beta2, eps = numbers
    sums = np.empty(width, of.gradient.dtype)
    kind = weight.dtype.type
    factor = kind(numbers[1])
    new_mean = kind(1 - beta1)
    old_square = kind(beta2)
    new_square = kind(1 - beta2)
    floor = kind(eps)
    for i in range(_U(first), _U(last)):
        if i + _AHEAD < _U(last):
            ahead = _U(rows[i + _AHEAD])
            _prefetch(weight, ahead * width, width)
            _prefetch(mean, ahead * width, width)
            _prefetch(square, ahead * width, width)
            _touch(times, ahead)
        _sum_of(sums, width, of, i)
        row = _U(rows[i])
        times[row] += 1
        count = np.float64(times[row])
        rate = kind(lr / (1 - beta1**count))
        root = kind(1 / math.sqrt(1 - beta2**count))
        at = row * width
        for j in range(width):
            g = factor * sums[j]
            m = mean[at + j] + new_mean * (g - mean[at + j])
            v = old_square * square[at + j] + new_square * (g * g)
            mean[at + j] = m
            square[at + j] = v
            weight[at + j] -= rate * m / (np.sqrt(v) * root + floor)


@jit
def split_sgd(weight: _A, states: _A, width: _A, rows: _A, of: _A, numbers: _A, first: _A, last: _A) -> None:
    """As `rules.SplitSgd`: `weight` is the upper half of a float32, the state the lower, both uint16.
    numbers: lr, factor.
    """
    (low,) = states
    sums = np.empty(width, of.gradient.dtype)
    rate = of.gradient.dtype.type(numbers[0] * numbers[1])
    for i in range(_U(first), _U(last)):
        if i + _AHEAD < _U(last):
            ahead = _U(rows[i + _AHEAD]) * width
            _prefetch(weight, ahead, width)
            _prefetch(low, ahead, width)
        _sum_of(sums, width, of, i)
        at = _U(rows[i]) * width
        for j in range(width):
            value = np.float32(_join(weight[at + j], low[at + j]) - rate * sums[j])
            weight[at + j] = _upper(value)
            low[at + j] = _lower(value)


@jit(exact=True)
def divide(
    rows: Any, offsets: Any, parts: Any, order: Any, local_rows: Any, lengths: Any, starts: Any
) -> None:
    """See `Kernels.divide`: fill `order` and `local_rows` [n], and the zeroed `lengths` [parts * bags] and
    `starts` [parts]. All integers are uint64."""
    bags = _U(len(offsets) - 1)
    for bag in range(bags):
        for i in range(offsets[bag], offsets[bag + _U(1)]):
            lengths[(rows[i] % parts) * bags + bag] += _U(1)
    at = _U(0)
    for part in range(parts):
        starts[part] = at
        for bag in range(bags):
            at += lengths[part * bags + bag]
    for i in range(_U(len(rows))):
        quotient = rows[i] // parts
        part = rows[i] - quotient * parts
        at = starts[part]
        order[at], local_rows[at] = i, quotient
        starts[part] = at + _U(1)


@jit(inline=True, exact=True)
def finalise(x: Any) -> Any:
    """`splitmix.finalise_` of a uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(SECOND)
    return x ^ (x >> np.uint64(31))


@jit(exact=True)
def initial(out: Any, rows: Any, columns: Any, key: Any, bound: Any) -> None:
    """As `initial.initial_rows`, bit by bit. columns: [width], mixed; all integers uint64."""
    width = np.uint64(len(columns))
    for i in range(np.uint64(len(rows))):
        mixed, at = finalise((rows[i] + np.uint64(1)) * np.uint64(GOLDEN) + key), i * width
        for j in range(width):
            bits = finalise(mixed ^ columns[j]) >> np.uint64(11)
            out[at + j] = (np.float64(bits) * 2.0**-52 - 1.0) * bound
