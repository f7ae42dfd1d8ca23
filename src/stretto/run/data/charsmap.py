"""SentencePiece's table of rewritten text (`precompiled_charsmap`) as normalizers of `tokenizers`.

SentencePiece replaces, from the left, the longest run of characters that has a rule; the rules are those of
Unicode's NFKC and some more. The library's own `Precompiled` is for single characters: of a letter with
several accents it loses some. So text is cut where SentencePiece cuts it, by marks that no text has;
`Precompiled` rewrites the characters one by one; and NFC, which does not reach across a mark, composes those
of one rule.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from tokenizers import Regex, normalizers

_ESCAPE = "\ufff0"
"""Begins a mark. No character: it ends what a reader sees as a letter, and composes with nothing."""
_ITSELF, _CUT, _ALONE = (_ESCAPE + digit for digit in "012")
_JOINS = r"\p{M}\x{200C}\x{200D}\x{E33}\x{EB3}\x{1F3FB}-\x{1F3FF}\x{E0020}-\x{E007F}\x{16D67}"
"""Continues the letter before it: marks, joiners, colours of skin, tags."""
_CHUNK = 1 << 12
_PLANE = 0x10000


def rules_of(charsmap: bytes) -> dict[str, str]:
    """What is rewritten, and into what.

    The table is a trie as a double array of darts-clone (Yata, Oono, Morita, Fuketa, Sumitomo and Aoe 2007),
    and the new texts, each with a zero behind it.

    Raises:
        ValueError: damaged.
    """
    if len(charsmap) < 8:
        raise ValueError("a table of normalization that is cut off")
    (size,) = struct.unpack_from("<I", charsmap)
    if size % 4 or not 0 < size <= len(charsmap) - 4:
        raise ValueError("a table of normalization that is cut off")
    units = np.frombuffer(charsmap, "<u4", size // 4, 4).astype(np.int64)
    texts = charsmap[4 + size :]
    labels = np.arange(1, 256)
    rules = dict[str, str]()
    places, words = _children(units[:1]), [b""]
    while len(words):  # all nodes of one depth
        following, longer = list[np.ndarray](), list[bytes]()
        for at in range(0, len(words), _CHUNK):
            there = places[at : at + _CHUNK, None] ^ labels
            nodes = units[np.where(there < len(units), there, 0)]
            row, column = np.nonzero((there < len(units)) & ((nodes & 0x800000FF) == labels))
            children = there[row, column] ^ _children(nodes[row, column])
            following.append(children)
            longer += [
                words[at + r] + bytes((c + 1,)) for r, c in zip(row.tolist(), column.tolist(), strict=True)
            ]
            ends = (nodes[row, column] >> 8) & 1 == 1
            for number in np.flatnonzero(ends).tolist():
                child = int(children[number])
                begin = int(units[child]) & 0x7FFFFFFF if child < len(units) else len(texts)
                rules[longer[number - len(row)].decode()] = texts[begin : texts.index(b"\0", begin)].decode()
        places, words = np.concatenate(following), longer
        if words and len(words[0]) > 64:
            raise ValueError("a table of normalization with a circle")
    return rules


def _children(units: np.ndarray) -> np.ndarray:
    """Where the children of nodes are, apart from their labels."""
    return (units >> 10) << ((units & (1 << 9)) >> 6)


def unequal(rules: Mapping[str, str]) -> str | None:
    """A rule that `rewriting` would not follow; None: it follows all, but for composing characters of
    scripts that are newer than the library's tables of Unicode (beyond U+FFFF).
    """
    several = [text for text in rules if len(text) > 1]
    if not several:
        return None
    composed = normalizers.NFC().normalize_str(
        _ESCAPE.join("".join(rules.get(c, c) for c in text) for text in several)
    )
    for text, made in zip(several, composed.split(_ESCAPE), strict=True):
        if made != rules[text] and max(map(ord, text)) < _PLANE:
            return text
    odd = (text for text in rules if text[0] in "012" + _ESCAPE or "\0" in text)
    return next(odd, None)


def rewriting(
    charsmap: bytes, rules: Mapping[str, str], kept: Sequence[str] = ()
) -> list[normalizers.Normalizer]:
    """What rewrites text by the rules.

    Args:
        kept: texts that are left as they are, and that no rule reaches into.
    """
    several = [text for text in rules if len(text) > 1]
    follow = {c for text in several for c in text[1:]}
    follow |= {c for c, made in rules.items() if len(c) == 1 and made[:1] in follow}
    joins = f"[{_JOINS}{character_class(follow)}]"
    symbols = "".join(f"{re.escape(text)}|" for text in sorted(kept, key=len, reverse=True))
    keys = f"(?:{_matching(several)}|(?m:.))" if several else "(?m:.)"
    removed = [text for text, made in rules.items() if len(text) == 1 and not made]
    return [
        normalizers.Replace(_ESCAPE, _ITSELF),
        normalizers.Replace(Regex(rf"(?:{symbols}(?=(?m:.){joins}){keys})\K"), _CUT),
        # Precompiled panics where it removes what a text begins with
        *([normalizers.Replace(Regex(f"[{character_class(removed)}]"), "")] if removed else []),
        normalizers.Replace(Regex(rf"(?!\A)(?={joins})|(?<=\r)(?=\n)"), _ALONE),
        normalizers.Precompiled(charsmap),
        normalizers.Replace(_ALONE, ""),
        normalizers.NFC(),
        normalizers.Replace(_CUT, ""),
        normalizers.Replace(_ITSELF, _ESCAPE),
    ]


def _matching(texts: Iterable[str]) -> str:
    """An expression for the longest of these texts; firsts with the same continuations share one."""
    tails = dict[str, set[str]]()
    for text in texts:
        tails.setdefault(text[0], set()).add(text[1:])
    alike = dict[frozenset[str], list[str]]()
    for first, rest in tails.items():
        alike.setdefault(frozenset(rest), []).append(first)
    return "|".join(f"[{character_class(firsts)}]{_behind(rest)}" for rest, firsts in alike.items())


def _behind(rest: frozenset[str]) -> str:
    more = rest - {""}
    return f"(?:{_matching(sorted(more))})" + "?" * ("" in rest) if more else ""


def character_class(characters: Iterable[str]) -> str:
    """The inside of a class of characters."""
    return "".join(
        rf"\x{{{first:X}}}" + (rf"-\x{{{last:X}}}" if last > first else "")
        for first, last in _runs(sorted(map(ord, characters)))
    )


def _runs(codes: Sequence[int]) -> Iterator[tuple[int, int]]:
    start = None
    for at, code in enumerate(codes):
        start = code if start is None else start
        if at + 1 == len(codes) or codes[at + 1] != code + 1:
            yield start, code
            start = None
