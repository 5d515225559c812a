"""What islands compare before they begin: code and data, in a few digits.

experiment's file, project -> code_digest; experiment -> data_digest
"""

import hashlib
import sys
from pathlib import Path

from hexijax.experiment import Experiment


def digest(text: str) -> str:
    """Of anything islands must share."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def code_digest(experiment: Path, root: Path) -> str:
    """Of hexijax, the experiment's file, and what it imported from its project."""
    import hexijax

    package = Path(hexijax.__file__).parent
    found = {f"hexijax/{p.relative_to(package)}": p for p in package.rglob("*.py")}
    for module in list(sys.modules.values()):
        file = Path(getattr(module, "__file__", None) or "")
        if file.suffix != ".py" or not file.is_relative_to(root):
            continue
        own = file.relative_to(root)
        if "site-packages" not in own.parts and not file.is_relative_to(package):
            found[str(own)] = file
    found[f"experiment/{experiment.name}"] = experiment
    sums = [f"{name} {digest(found[name].read_text())}" for name in sorted(found)]
    return digest("\n".join(sums))


def data_digest(experiment: Experiment) -> str:
    """Of what is trained and evaluated on."""
    both = (experiment.data, experiment.eval_data)
    return digest("\n".join(x.fingerprint() for x in both if x is not None))
