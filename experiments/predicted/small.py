"""A Llama of six small blocks, for two forced CPU devices.

Run:     hexijax profile experiments/predicted/small.py --out FILE
Needs:   two cores, a minute
Expect:  a profile file, from which `experiments.predicted_plans --small` draws
"""

from experiments.common import adamw, next_token
from hexijax.data import RandomTokens
from hexijax.experiment import Experiment
from models.llama import Llama, LlamaConfig

CONFIG = LlamaConfig(
    vocab_size=256, width=64, depth=6, num_heads=4, num_kv_heads=4, ff_width=128
)
LENGTH = 32


def experiment() -> Experiment:
    """Tokens drawn at random."""
    return Experiment(
        name="llama_small",
        loss=next_token(Llama, CONFIG),
        optimizer=adamw(1e-3, 50),
        clip_norm=1.0,
        data=RandomTokens(CONFIG.vocab_size, LENGTH),
        batch_size=8,
        tokens_per_sample=LENGTH,
        cluster="../clusters/cpu_x2.toml",
    )
