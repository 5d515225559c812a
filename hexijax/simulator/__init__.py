"""Program x costs -> Timeline: when everything happens, before anything runs."""

from hexijax.simulator.play import simulate
from hexijax.simulator.predict import predict
from hexijax.simulator.timeline import Cause, Event, Timeline

__all__ = ["Cause", "Event", "Timeline", "predict", "simulate"]
