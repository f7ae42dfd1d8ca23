"""Token ids of your own for `stretto train`, which finds the class by FILE.py:NAME: no text, no tokenizer.

    stretto train examples/my_tokens.yaml
    stretto verify examples/my_tokens.yaml

`my_tokens.yaml`, beside this file, names it. A dataset of Hugging Face or PyTorch fits as well: return
`self.dataset[number]["input_ids"]`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

DIGITS, PLUS, EQUALS, END = 10, 10, 11, 12  # ids 0 to 9 are digits; 13 ids in all


class Sums:
    """Sums such as 12+30=42, each a sample of its own length."""

    def __len__(self) -> int:
        """The number of samples."""
        return 5000

    def __getitem__(self, number: int) -> NDArray[np.int64]:
        """The ids of a sample, [its length]: any row of integers, in any order of calls."""
        a, b = (int(each) for each in np.random.default_rng(number).integers(100, size=2))
        symbols = {"+": PLUS, "=": EQUALS}
        return np.array([*(symbols.get(each) or int(each) for each in f"{a}+{b}={a + b}"), END])
