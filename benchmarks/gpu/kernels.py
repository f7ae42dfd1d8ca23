"""Attention by each choice of `train.attention` and by each of torch's backends, in the styles of
`benchmarks/attention.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from attention import STYLES, Sizes, possible

from gpu.setting import Setting
from gpu.speed import timed


def attention(setting: Setting) -> dict[str, Any]:
    """Seconds of forward and backward of one sample in bfloat16; of what cannot compute a style, why."""
    heads, sequence, head_dim = (4, 64, 16) if setting.tiny else (32, 4096, 128)
    sizes = Sizes(heads, sequence, head_dim, torch.bfloat16, setting.device)
    rows = dict[str, dict[str, Any]]()
    for name, style in STYLES.items():
        steps, reasons = possible(style, sizes)
        rows[name] = {who: {"error": why} for who, why in reasons.items()}
        for who, step in steps.items():
            setting.forget_peak()
            rows[name][who] = timed(step, setting, steps=20)
        setting.keep({"rows": rows})
    return {"heads": heads, "sequence": sequence, "head_dim": head_dim, "rows": rows}
