"""Where the public measurements lie, for tests that compare with them."""

import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("HEXIJAX_DATA", ""))

needs_public_data = pytest.mark.skipif(
    not os.environ.get("HEXIJAX_DATA"),
    reason="HEXIJAX_DATA is unset: it names the folder of public measurements",
)
