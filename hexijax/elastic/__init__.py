"""Members come and go: find out, plan again, move the state, go on.

Members (heartbeats, notices, a roll, stragglers) -> events
events -> plan (perhaps made ahead) -> engine -> recovery -> the same data position
"""

from hexijax.elastic.ahead import Asked, Planned, PlansAhead, losses
from hexijax.elastic.heartbeat import Heartbeats
from hexijax.elastic.members import Event, Members, What, lost
from hexijax.elastic.replans import Replans
from hexijax.elastic.roll import Roll
from hexijax.elastic.stragglers import Stragglers

__all__ = [
    "Asked",
    "Event",
    "Heartbeats",
    "Members",
    "Planned",
    "PlansAhead",
    "Replans",
    "Roll",
    "Stragglers",
    "What",
    "losses",
    "lost",
]
