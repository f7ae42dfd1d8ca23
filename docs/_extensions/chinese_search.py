"""Search in Chinese without a dictionary: a text is indexed, and a query split, by pairs of characters.

A word of the field that no dictionary has, such as 气泡率, is found like any other.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from sphinx.application import Sphinx
from sphinx.search import languages
from sphinx.search.en import SearchEnglish

_RUNS = re.compile(r"[\u3400-\u9fff]+|[^\W\u3400-\u9fff]+")


class SearchWords(SearchEnglish):
    """English, with the stem of a word computed once: pages repeat few words often."""

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        self._stem_once = cache(super().stem)

    def stem(self, word: str) -> str:
        """The stem of a word."""
        return self._stem_once(word)


class SearchPairs(SearchWords):
    """English words, and each two adjacent Chinese characters."""

    lang = "zh"
    language_name = "English"  # of the stemmer
    js_splitter_code = r"""
function splitQuery(query) {
  const pairs = (run) => [...run].slice(1).map((second, at) => run[at] + second);
  return [...query.matchAll(/[\u3400-\u9fff]+|(?:(?![\u3400-\u9fff])[\p{L}\p{N}_])+/gu)].flatMap(([run]) =>
    /^[\u3400-\u9fff]{3}/.test(run) ? pairs(run) : [run]);
}
"""

    def split(self, input: str) -> list[str]:
        """The words of a text."""
        terms = list[str]()
        for run in _RUNS.findall(input):
            chinese = len(run) > 2 and "\u3400" <= run[0] <= "\u9fff"
            terms += [run[at : at + 2] for at in range(len(run) - 1)] if chinese else [run]
        return terms


def setup(app: Sphinx) -> dict[str, Any]:
    languages["en"], languages["zh"] = SearchWords, SearchPairs
    return {"parallel_read_safe": True, "parallel_write_safe": True}
