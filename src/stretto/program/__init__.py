"""When every rank does what: schedules, programs, lowering, checking, replay, search, text.

Importing this package registers every schedule.
"""

# families in the order in which they are listed
# isort: off
from stretto.program.schedules import fill_drain as fill_drain
from stretto.program.schedules import one_f_one_b as one_f_one_b
from stretto.program.schedules import asynchronous as asynchronous
from stretto.program.schedules import zero_bubble as zero_bubble
from stretto.program.schedules import v_shaped as v_shaped
from stretto.program.schedules import wave as wave
from stretto.program.schedules import bidirectional as bidirectional
from stretto.program.search import auto as auto

# isort: on
from stretto.program.action import Action, ActionKind
from stretto.program.checks.check import CheckReport, check
from stretto.program.lower import lower, send_releases, unlower
from stretto.program.program import Program, ScheduleError
from stretto.program.schedules.registry import PLAIN, entry, names, options, register, schedule

__all__ = [
    "PLAIN",
    "Action",
    "ActionKind",
    "CheckReport",
    "Program",
    "ScheduleError",
    "check",
    "entry",
    "lower",
    "names",
    "options",
    "register",
    "schedule",
    "send_releases",
    "unlower",
]
