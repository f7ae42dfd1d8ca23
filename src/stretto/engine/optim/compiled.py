"""Updates in as few passes over memory as their norms allow, compiled by numba: the formulas of `adam` and
`adafactor`, chunk by chunk.

Every loop takes the first and last chunk, the tables of `chunks.Chunks`, [fragments, n] addresses of tensors,
and an empty array of their type; every sum is of one chunk, in float64 over runs of at most `_RUN` elements.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

from stretto.engine.loops import jit

_A = Any  # an array or a number, typed by numba
_intrinsic: Any = intrinsic
_carray: Any = numba.carray
_U = np.uint64
_RUN = 1024
_ROWS = 64  # whose squares are added up in the tensors' type before they are in float64

# Columns of `Chunks.chunks`
_MEMBER = 0
_COUNTED = 1
_START = 2
_HEIGHT = 3
_WIDTH = 4
_STRIDE = 5
_FIRST_ROW = 6
_FIRST_COLUMN = 7
_PARTIAL = 8
# and of `Chunks.members`
_FRAGMENT = 0
_INDEX = 1
_LINES = 2
_COLUMNS = 3
_LINE_SUMS = 4
_COLUMN_SUMS = 5


@_intrinsic
def _pointer(typing: Any, address: Any, like: Any) -> Any:
    """A pointer to elements of the type of `like`."""
    kind = types.CPointer(like.dtype)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(kind))

    return kind(types.intp, like), generate


@jit(inline=True)
def _row(address: _A, chunk: _A, row: _A, like: _A) -> _A:
    """A row of a chunk of the tensor at `address`."""
    at = chunk[_START] + row * chunk[_STRIDE]
    return _carray(_pointer(address + at * like.itemsize, like), chunk[_WIDTH])


@jit(inline=True)
def _vector(address: _A, first: _A, length: _A, like: _A) -> _A:
    """Elements of the tensor at `address`."""
    return _carray(_pointer(address + first * like.itemsize, like), length)


@jit
def lamb_directions(
    first: _A,
    last: _A,
    chunks: _A,
    members: _A,
    addresses: _A,
    like: _A,
    numbers: _A,
    steps: _A,
    sums: _A,
) -> None:
    """Move the moments, fill in directions as `adam.Lamb` says, and sum squares.

    Args:
        addresses: of parameters, gradients, both moments and directions.
        numbers: the betas, epsilon and weight decay.
        steps: [fragments] counts of updates with this one.
        sums: [chunks, 2], of the squares of parameters and directions.
    """
    kind = like.dtype.type
    beta1, beta2 = kind(numbers[0]), kind(numbers[1])
    eps, decay = kind(numbers[2]), kind(numbers[3])
    rest1, rest2 = kind(1.0 - numbers[0]), kind(1.0 - numbers[1])
    for k in range(first, last):
        chunk = chunks[k]
        fragment = members[chunk[_MEMBER], _FRAGMENT]
        scale1 = kind(1.0 / (1.0 - numbers[0] ** steps[fragment]))
        scale2 = kind(1.0 / np.sqrt(1.0 - numbers[1] ** steps[fragment]))
        weights = lengths = 0.0
        for i in range(chunk[_HEIGHT]):
            p = _row(addresses[fragment, 0], chunk, i, like)
            g = _row(addresses[fragment, 1], chunk, i, like)
            m = _row(addresses[fragment, 2], chunk, i, like)
            v = _row(addresses[fragment, 3], chunk, i, like)
            r = _row(addresses[fragment, 4], chunk, i, like)
            for begin in range(0, chunk[_WIDTH], _RUN):
                weight, length = kind(0), kind(0)
                for j in range(_U(begin), _U(min(begin + _RUN, chunk[_WIDTH]))):
                    mean = beta1 * m[j] + rest1 * g[j]
                    square = beta2 * v[j] + rest2 * g[j] * g[j]
                    direction = mean * scale1 / (np.sqrt(square) * scale2 + eps) + decay * p[j]
                    m[j] = mean
                    v[j] = square
                    r[j] = direction
                    weight += p[j] * p[j]
                    length += direction * direction
                weights += weight
                lengths += length
        sums[k, 0] = weights
        sums[k, 1] = lengths


@jit
def add_sums(
    first: _A, last: _A, chunks: _A, members: _A, addresses: _A, like: _A, sums: _A, out: _A
) -> None:
    """Add the chunks' sums, [chunks, n], to those of the members, [n, members], where they are counted."""
    for k in range(first, last):
        if chunks[k, _COUNTED]:
            for n in range(len(out)):
                out[n, chunks[k, _MEMBER]] += sums[k, n]


@jit
def lamb_factors(
    first: _A,
    last: _A,
    chunks: _A,
    members: _A,
    addresses: _A,
    like: _A,
    squares: _A,
    lr: _A,
    factors: _A,
) -> None:
    """Fill in the learning rates of members [first, last).

    Args:
        squares: [2, members], of parameters and directions, over all holders.
    """
    for k in range(first, last):
        weight, length = np.sqrt(squares[0, k]), np.sqrt(squares[1, k])
        factors[k] = lr * weight / length if weight > 0.0 and length > 0.0 else lr


@jit
def lamb_subtract(first: _A, last: _A, chunks: _A, members: _A, addresses: _A, like: _A, factors: _A) -> None:
    """Subtract the directions times the factors of their members.

    Args:
        addresses: as for `lamb_directions`.
    """
    for k in range(first, last):
        chunk = chunks[k]
        fragment = members[chunk[_MEMBER], _FRAGMENT]
        factor = like.dtype.type(factors[chunk[_MEMBER]])
        for i in range(chunk[_HEIGHT]):
            p = _row(addresses[fragment, 0], chunk, i, like)
            r = _row(addresses[fragment, 4], chunk, i, like)
            for j in range(_U(chunk[_WIDTH])):
                p[j] -= factor * r[j]


@jit
def adafactor_squares(
    first: _A, last: _A, chunks: _A, members: _A, addresses: _A, like: _A, sums: _A
) -> None:
    """Sum squares of parameters, and of the rows and columns of matrices' gradients.

    Args:
        addresses: of parameters and gradients.
        sums: flat; a chunk's begin at `_PARTIAL`: one of its parameters, one of each row, one of each column.
    """
    kind = like.dtype.type
    for k in range(first, last):
        chunk = chunks[k]
        fragment = members[chunk[_MEMBER], _FRAGMENT]
        height, width = chunk[_HEIGHT], chunk[_WIDTH]
        at = chunk[_PARTIAL]
        weights = 0.0
        if not members[chunk[_MEMBER], _LINES]:
            for i in range(height):
                p = _row(addresses[fragment, 0], chunk, i, like)
                for begin in range(0, width, _RUN):
                    weight = kind(0)
                    for j in range(_U(begin), _U(min(begin + _RUN, width))):
                        weight += p[j] * p[j]
                    weights += weight
            sums[at] = weights
            continue
        columns = sums[at + 1 + height : at + 1 + height + width]
        few = np.zeros(width, like.dtype)
        for j in range(_U(width)):
            columns[j] = 0.0
        for i in range(height):
            p = _row(addresses[fragment, 0], chunk, i, like)
            g = _row(addresses[fragment, 1], chunk, i, like)
            line = 0.0
            for begin in range(0, width, _RUN):
                weight, square = kind(0), kind(0)
                for j in range(_U(begin), _U(min(begin + _RUN, width))):
                    one = g[j] * g[j]
                    few[j] += one
                    square += one
                    weight += p[j] * p[j]
                line += square
                weights += weight
            sums[at + 1 + i] = line
            if (i + 1) % _ROWS == 0 or i + 1 == height:
                for j in range(_U(width)):
                    columns[j] += few[j]
                    few[j] = kind(0)
        sums[at] = weights


@jit
def adafactor_totals(
    first: _A,
    last: _A,
    chunks: _A,
    members: _A,
    addresses: _A,
    like: _A,
    sums: _A,
    totals: _A,
    rows: _A,
) -> None:
    """Add up what `adafactor_squares` has summed, where it is counted.

    Args:
        totals: zeros; flat: of all rows of all members, all columns, and each member's parameters.
        rows: number of all rows, and of all columns.
    """
    for k in range(first, last):
        chunk = chunks[k]
        if chunk[_COUNTED]:
            member, at = members[chunk[_MEMBER]], chunk[_PARTIAL]
            totals[rows[0] + rows[1] + chunk[_MEMBER]] += sums[at]
            if member[_LINES]:
                to = member[_LINE_SUMS] + chunk[_FIRST_ROW]
                for i in range(chunk[_HEIGHT]):
                    totals[to + i] += sums[at + 1 + i]
                to = rows[0] + member[_COLUMN_SUMS] + chunk[_FIRST_COLUMN]
                at += 1 + chunk[_HEIGHT]
                for j in range(chunk[_WIDTH]):
                    totals[to + j] += sums[at + j]


@jit
def adafactor_factors(
    first: _A,
    last: _A,
    chunks: _A,
    members: _A,
    addresses: _A,
    like: _A,
    totals: _A,
    rows: _A,
    new: _A,
    smallest: _A,
    factors: _A,
) -> None:
    """Move the second moments of matrices among members [first, last), and take the roots of their inverses.

    Args:
        addresses: as third and fourth of the second moments of rows and columns.
        totals, rows: as in `adafactor_totals`, over all holders.
        new: [fragments], the weight of the new squares.
        factors: filled in with the factor of each row of all members and each column.
    """
    for k in range(first, last):
        member = members[k]
        fragment = member[_FRAGMENT]
        height, width = member[_LINES], member[_COLUMNS]
        if not height:
            continue
        of_row = _vector(addresses[fragment, 2], member[_INDEX] * height, height, like)
        of_column = _vector(addresses[fragment, 3], member[_INDEX] * width, width, like)
        total = 0.0
        at = member[_LINE_SUMS]
        for i in range(height):
            before = np.float64(of_row[i])
            of_row[i] = before + new[fragment] * (totals[at + i] / width - before)
            total += of_row[i]
        mean = total / height
        if mean < smallest:
            mean = smallest
        for i in range(height):
            factors[at + i] = 1.0 / np.sqrt(of_row[i] / mean)
        at = rows[0] + member[_COLUMN_SUMS]
        for j in range(width):
            before = np.float64(of_column[j])
            of_column[j] = before + new[fragment] * (totals[at + j] / height - before)
            factors[at + j] = 1.0 / np.sqrt(np.float64(of_column[j]))


@jit
def adafactor_lengths(
    first: _A,
    last: _A,
    chunks: _A,
    members: _A,
    addresses: _A,
    like: _A,
    factors: _A,
    rows: _A,
    new: _A,
    smallest: _A,
    sums: _A,
) -> None:
    """Move the second moments of vectors, and sum the squares of updates.

    Args:
        addresses: as second of gradients, as third of vectors' second moments.
        sums: [chunks, 1].
    """
    kind = like.dtype.type
    most, least = kind(1.0 / smallest), kind(smallest * smallest)
    for k in range(first, last):
        chunk = chunks[k]
        member = members[chunk[_MEMBER]]
        fragment, width = member[_FRAGMENT], chunk[_WIDTH]
        lengths = 0.0
        weight = kind(new[fragment])
        columns = factors[rows[0] + member[_COLUMN_SUMS] + chunk[_FIRST_COLUMN] :]
        for i in range(chunk[_HEIGHT]):
            g = _row(addresses[fragment, 1], chunk, i, like)
            if member[_LINES]:
                line = factors[member[_LINE_SUMS] + chunk[_FIRST_ROW] + i]
                for begin in range(0, width, _RUN):
                    length = kind(0)
                    for j in range(_U(begin), _U(min(begin + _RUN, width))):
                        factor = line * columns[j]
                        update = (most if factor > most else factor) * g[j]
                        length += update * update
                    lengths += length
            else:
                v = _row(addresses[fragment, 2], chunk, i, like)
                for begin in range(0, width, _RUN):
                    length = kind(0)
                    for j in range(_U(begin), _U(min(begin + _RUN, width))):
                        square = v[j] + weight * (g[j] * g[j] - v[j])
                        v[j] = square
                        update = g[j] / np.sqrt(least if square < least else square)
                        length += update * update
                    lengths += length
        sums[k, 0] = lengths


@jit
def adafactor_rates(
    first: _A,
    last: _A,
    chunks: _A,
    members: _A,
    addresses: _A,
    like: _A,
    sizes: _A,
    lengths: _A,
    facts: _A,
    constants: _A,
    rates: _A,
) -> None:
    """Fill in the factors of the updates of members [first, last).

    Args:
        sizes, lengths: [members] and [1, members], squares of parameters and updates, over all holders.
        facts: [fragments, 2], bounds of the relative step, and elements of a member.
        constants: the smallest scale, and the largest RMS of an update.
    """
    for k in range(first, last):
        relative, elements = facts[members[k, _FRAGMENT]]
        scale = np.sqrt(sizes[k] / elements)
        over = np.sqrt(lengths[0, k] / elements) / constants[1]
        rates[k] = (
            relative * (constants[0] if scale < constants[0] else scale) / (1.0 if over < 1.0 else over)
        )


@jit
def adafactor_apply(
    first: _A,
    last: _A,
    chunks: _A,
    members: _A,
    addresses: _A,
    like: _A,
    factors: _A,
    rows: _A,
    smallest: _A,
    kept: _A,
    rates: _A,
) -> None:
    """Decay the parameters and subtract the updates.

    Args:
        addresses: of parameters, gradients and vectors' second moments.
        kept: what decay leaves of a weight.
        rates: [members], factors of the updates.
    """
    kind = like.dtype.type
    most, least = kind(1.0 / smallest), kind(smallest * smallest)
    rest = kind(kept)
    for k in range(first, last):
        chunk = chunks[k]
        member = members[chunk[_MEMBER]]
        fragment, rate = member[_FRAGMENT], kind(rates[chunk[_MEMBER]])
        columns = factors[rows[0] + member[_COLUMN_SUMS] + chunk[_FIRST_COLUMN] :]
        for i in range(chunk[_HEIGHT]):
            p = _row(addresses[fragment, 0], chunk, i, like)
            g = _row(addresses[fragment, 1], chunk, i, like)
            if member[_LINES]:
                line = factors[member[_LINE_SUMS] + chunk[_FIRST_ROW] + i]
                for j in range(_U(chunk[_WIDTH])):
                    factor = line * columns[j]
                    p[j] = rest * p[j] - rate * ((most if factor > most else factor) * g[j])
            else:
                v = _row(addresses[fragment, 2], chunk, i, like)
                for j in range(_U(chunk[_WIDTH])):
                    square = least if v[j] < least else v[j]
                    p[j] = rest * p[j] - rate * (g[j] / np.sqrt(square))
