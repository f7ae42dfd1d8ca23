"""Search in Chinese without a dictionary: a text is indexed, and a query split, by pairs of characters.

A word of the field that no dictionary has, such as 气泡率, is found like any other.
"""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx
from sphinx.search import languages
from sphinx.search.en import SearchEnglish

_RUNS = re.compile(r"[\u3400-\u9fff]+|[^\W\u3400-\u9fff]+")


class SearchPairs(SearchEnglish):
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
    languages["zh"] = SearchPairs
    return {"parallel_read_safe": True, "parallel_write_safe": True}
