"""When every rank does what: schedules, programs, lowering, checking, text."""

# families in the order in which they are listed
# isort: off
from stretto.schedule import fill_drain as fill_drain
from stretto.schedule import one_f_one_b as one_f_one_b
from stretto.schedule import asynchronous as asynchronous
from stretto.schedule import zero_bubble as zero_bubble
from stretto.schedule import v_shaped as v_shaped
from stretto.schedule import wave as wave
from stretto.schedule import bidirectional as bidirectional
from stretto.schedule import inference as inference
from stretto.schedule import searched as searched

# isort: on
from stretto.schedule.action import Action, Kind
from stretto.schedule.check import Report, check
from stretto.schedule.lower import lower, send_releases
from stretto.schedule.program import Program
from stretto.schedule.registry import names, options, schedule
from stretto.schedule.structure import ScheduleError

__all__ = [
    "Action",
    "Kind",
    "Program",
    "Report",
    "ScheduleError",
    "check",
    "lower",
    "names",
    "options",
    "schedule",
    "send_releases",
]
