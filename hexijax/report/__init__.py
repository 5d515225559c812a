"""What a run leaves behind, and what a person reads of it.

folder    runs/<name>-<number>/, files that are whole or absent
metrics   a line a step: loss, tokens/s, MFU, gradient norm
summary   report.json, and its few lines for the screen
"""

from hexijax.report.folder import RunFolder, write_atomically
from hexijax.report.metrics import Meter, Metrics

__all__ = ["Meter", "Metrics", "RunFolder", "write_atomically"]
