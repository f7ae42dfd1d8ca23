"""Programs as text: single actions, torch's CSV, and lossless JSON.

The CSV is that of torch.distributed.pipelining: a row per rank, a cell per action, "compute only" before
lowering and "compute + comms" after. Unlike JSON it does not contain names, parameters, tied sets, copies and
weight versions.
"""

from stretto.program.text.actions import parse_action
from stretto.program.text.json_format import from_json, to_json
from stretto.program.text.read import read_program, read_text_program
from stretto.program.text.torch_csv import check_torch, exact_csv, from_csv, to_csv

__all__ = [
    "check_torch",
    "exact_csv",
    "from_csv",
    "from_json",
    "parse_action",
    "read_program",
    "read_text_program",
    "to_csv",
    "to_json",
]
