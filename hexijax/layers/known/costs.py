"""Operations and bytes of each family's layers, as a trace of its module counts them.

A block's products are 8·T·D·D (query, key, value, out), 4·T·D·F (up, down) and 4·T·T·D
(scores, mixing). The small terms were read off traces of many sizes, which they meet
exactly: 21·T·D is two LayerNorms, biases and residual sums, 9·T·F a GELU.
"""

from hexijax.layers.known.terms import Bytes, Costs

INPUT: Bytes = {"TD": (1, 0)}
SCORES = "NTT"
"""The product that only attention with its scores written out has bytes of."""

PRE_NORM = Costs(
    forward={"TDD": 8, "TDF": 4, "TTD": 4, "TD": 21, "TF": 9, "NTT": 7, "TT": 2},
    backward={"TDD": 16, "TDF": 8, "TTD": 8, "TD": 33, "TF": 12, "NTT": 7},
    moved={"TD": (16, 168), "TF": (22, 0), "NTT": (-2, 79), "TT": (0, 22)},
    kept={"TD": (7, 24), "TF": (6, 0), "NTT": (1, 4), "NT": (0, 8), "T": (0, 32)},
    dots={"TD": (6, 0), "TF": (1, 0), "NTT": (0, 4)},
    full=INPUT,
)
POST_NORM = Costs(
    forward={"TDD": 8, "TDF": 4, "TTD": 4, "TD": 21, "TF": 9, "NTT": 6},
    backward={"TDD": 16, "TDF": 8, "TTD": 8, "TD": 33, "TF": 12, "NTT": 7},
    moved={"TD": (16, 168), "TF": (22, 0), "NTT": (-2, 64)},
    kept={"TD": (6, 24), "TF": (6, 0), "NTT": (1, 4), "NT": (0, 8), "T": (0, 32)},
    dots={"TD": (7, 0), "TF": (1, 0), "NTT": (0, 4)},
    full=INPUT,
)
LLAMA = Costs(
    forward={"TDD": 4, "TDK": 4, "TDF": 6, "TTD": 4, "TD": 15, "TK": 3, "TF": 3,
             "NTT": 7, "TT": 2},
    backward={"TDD": 8, "TDK": 8, "TDF": 12, "TTD": 8, "TD": 24.5, "TK": 3.5, "TF": 6,
              "NTT": 7},
    moved={"TD": (0, 206), "TK": (0, 64), "TF": (11, 0), "NTT": (-2, 79),
           "TT": (0, 22)},
    kept={"TD": (5, 24), "TF": (6, 0), "TK": (2, 0), "NTT": (1, 4), "NT": (0, 8),
          "T": (0, 16)},
    dots={"TD": (4, 0), "TF": (2, 0), "TK": (2, 0), "NTT": (0, 4)},
    full=INPUT,
)  # fmt: skip

TOKENS = Costs(
    forward={}, backward={}, moved={"TD": (-3, 16)}, kept={}, dots={}, full={}
)
TOKENS_AND_POSITIONS = Costs(
    forward={"TD": 1}, backward={}, moved={"TD": (-3, 32)}, kept={}, dots={}, full={}
)
BERT_EMBED = Costs(
    forward={"TD": 9},
    backward={"TD": 12},
    moved={"TD": (-12, 132)},
    kept={"TD": (0, 12), "T": (0, 16)},
    dots={},
    full={},
)
PATCHES = Costs(
    forward={"TPD": 2, "TD": 2},
    backward={"TPD": 2, "TD": 1},
    moved={"TP": (-2, 20), "TD": (5, 12)},
    kept={},
    dots={},
    full={},
)

GPT_HEAD = Costs(
    forward={"TDV": 2, "TD": 7, "TV": 6},
    backward={"TDV": 4, "TD": 12, "TV": 5},
    moved={"TD": (-8, 84), "TV": (-2, 58)},
    kept={"TD": (2, 12), "TV": (1, 0), "T": (0, 20)},
    dots={"TD": (1, 0), "TV": (1, 0)},
    full=INPUT,
)
LLAMA_HEAD = Costs(
    forward={"TDV": 2, "TD": 5, "TV": 6},
    backward={"TDV": 4, "TD": 8, "TV": 5},
    moved={"TD": (-8, 72), "TV": (-2, 58)},
    kept={"TD": (2, 12), "TV": (1, 0), "T": (0, 12)},
    dots={"TD": (1, 0), "TV": (1, 0)},
    full=INPUT,
)
BERT_HEAD = Costs(
    forward={"TDD": 2, "TDV": 2, "TD": 16, "TV": 7},
    backward={"TDD": 4, "TDV": 4, "TD": 24, "TV": 6},
    moved={"TD": (14, 84), "TV": (0, 58)},
    kept={"TD": (7, 12), "TV": (1, 0), "T": (0, 20)},
    dots={"TD": (2, 0), "TV": (1, 0)},
    full=INPUT,
)
VIT_HEAD = Costs(
    forward={"DV": 2, "D": 7, "V": 7},
    backward={"DV": 4, "D": 10, "V": 5},
    moved={"D": (-20, 140), "V": (-2, 70)},
    kept={"D": (2, 12), "V": (1, 0), "1": (0, 20)},
    dots={"D": (1, 0), "V": (1, 0)},
    full={"D": (1, 0)},
)
