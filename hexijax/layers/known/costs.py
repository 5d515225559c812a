"""Operations and bytes of each family's layers, as a trace of its module counts them.

A block's products are 8·T·D·D (query, key, value, out), 4·T·D·F (up, down) and 4·T·T·D
(scores, mixing). The small terms were read off traces of many sizes, which they meet
exactly: 21·T·D is two LayerNorms, biases and residual sums, 9·T·F a GELU. Bytes are
those of `layers.fusion`, of the compute dtype and of any: (16, 48)·T·D.
"""

from hexijax.layers.known.terms import Bytes, Costs

INPUT: Bytes = {"TD": (1, 0)}
SCORES = "NTT"
"""The product that only attention with its scores written out has bytes of."""

PRE_NORM = Costs(
    forward={"TDD": 8, "TDF": 4, "TTD": 4, "TD": 21, "TF": 9, "NTT": 7, "TT": 2},
    backward={"TDD": 16, "TDF": 8, "TTD": 8, "TD": 33, "TF": 12, "NTT": 7},
    products=(("T", "D", "D", 4.0), ("T", "D", "F", 1.0), ("T", "F", "D", 1.0)),
    moved={"TD": (15, 0), "TF": (2, 0), "NTT": (1, 9)},
    back={"TD": (16, 48), "TF": (7, 0), "NTT": (2, 13), "T": (0, 80)},
    kept={"TD": (6, 24), "TF": (6, 0), "NTT": (1, 4), "NT": (0, 8), "T": (0, 32)},
    dots={"TD": (6, 0), "TF": (1, 0), "NTT": (0, 4)},
    full=INPUT,
    joined={"TD": (8, 0), "TF": (2, 0), "NTT": (1, 4)},
)
POST_NORM = Costs(
    forward={"TDD": 8, "TDF": 4, "TTD": 4, "TD": 21, "TF": 9, "NTT": 6},
    backward={"TDD": 16, "TDF": 8, "TTD": 8, "TD": 33, "TF": 12, "NTT": 7},
    products=(("T", "D", "D", 4.0), ("T", "D", "F", 1.0), ("T", "F", "D", 1.0)),
    moved={"TD": (12, 0), "TF": (2, 0), "NTT": (1, 4)},
    back={"TD": (15, 48), "TF": (7, 0), "NTT": (2, 12), "T": (0, 80)},
    kept={"TD": (6, 24), "TF": (6, 0), "NTT": (1, 4), "NT": (0, 8), "T": (0, 32)},
    dots={"TD": (7, 0), "TF": (1, 0), "NTT": (0, 4)},
    full=INPUT,
    joined={"TD": (8, 0), "TF": (2, 0), "NTT": (1, 4)},
    reads_input=True,
)
LLAMA = Costs(
    forward={"TDD": 4, "TDK": 4, "TDF": 6, "TTD": 4, "TD": 15, "TK": 3, "TF": 3,
             "NTT": 7, "TT": 2},
    backward={"TDD": 8, "TDK": 8, "TDF": 12, "TTD": 8, "TD": 24.5, "TK": 3.5, "TF": 6,
              "NTT": 7},
    products=(("T", "D", "D", 2.0), ("T", "D", "K", 2.0), ("T", "D", "F", 2.0),
              ("T", "F", "D", 1.0)),
    moved={"TD": (11, 0), "TK": (2, 3), "TF": (3, 0), "NTT": (1, 9), "T": (0, 60)},
    back={"TD": (15, 37), "TK": (1, 6), "TF": (9, 0), "NTT": (2, 13), "T": (0, 80)},
    kept={"TD": (4, 24), "TF": (6, 0), "TK": (2, 0), "NTT": (1, 4), "NT": (0, 8),
          "T": (0, 16)},
    dots={"TD": (4, 0), "TF": (2, 0), "TK": (2, 0), "NTT": (0, 4)},
    full=INPUT,
    joined={"TD": (6, 0), "TK": (2, 0), "TF": (3, 0), "NTT": (1, 4)},
)  # fmt: skip

TOKENS = Costs(
    forward={},
    backward={},
    products=(),
    moved={"TD": (-3, 20)},
    back={"TD": (-3, 20)},
    kept={},
    dots={},
    full={},
    joined={},
)
TOKENS_AND_POSITIONS = Costs(
    forward={"TD": 1},
    backward={},
    products=(),
    moved={"TD": (2, 12)},
    back={"TD": (-3, 20)},
    kept={},
    dots={},
    full={},
    joined={},
)
BERT_EMBED = Costs(
    forward={"TD": 9},
    backward={"TD": 12},
    products=(),
    moved={"TD": (3, 12)},
    back={"TD": (3, 28), "T": (0, 8)},
    kept={"TD": (0, 12), "T": (0, 16)},
    dots={},
    full={},
    joined={"TD": (0, 4)},
)
PATCHES = Costs(
    forward={"TPD": 2, "TD": 2},
    backward={"TPD": 2, "TD": 1},
    products=(("T", "P", "D", 1.0),),
    moved={"TD": (3, 0)},
    back={"TD": (2, 0)},
    kept={},
    dots={},
    full={},
    joined={},
)

GPT_HEAD = Costs(
    forward={"TDV": 2, "TD": 7, "TV": 6},
    backward={"TDV": 4, "TD": 12, "TV": 5},
    products=(("T", "D", "V", 1.0),),
    moved={"TD": (2, 0), "TV": (1, 8)},
    back={"TD": (4, 16), "TV": (2, 8), "T": (0, 20)},
    kept={"TD": (1, 12), "TV": (1, 0), "T": (0, 20)},
    dots={"TD": (1, 0), "TV": (1, 0)},
    full=INPUT,
    joined={"TD": (2, 0), "TV": (1, 0)},
)
LLAMA_HEAD = Costs(
    forward={"TDV": 2, "TD": 5, "TV": 6},
    backward={"TDV": 4, "TD": 8, "TV": 5},
    products=(("T", "D", "V", 1.0),),
    moved={"TD": (2, 0), "TV": (1, 8), "T": (0, 9)},
    back={"TD": (3, 16), "TV": (2, 8), "T": (0, 15)},
    kept={"TD": (1, 12), "TV": (1, 0), "T": (0, 12)},
    dots={"TD": (1, 0), "TV": (1, 0)},
    full=INPUT,
    joined={"TD": (2, 0), "TV": (1, 0)},
)
BERT_HEAD = Costs(
    forward={"TDD": 2, "TDV": 2, "TD": 16, "TV": 7},
    backward={"TDD": 4, "TDV": 4, "TD": 24, "TV": 6},
    products=(("T", "D", "D", 1.0), ("T", "D", "V", 1.0)),
    moved={"TD": (2, 0), "TV": (1, 8)},
    back={"TD": (9, 16), "TV": (2, 8), "T": (0, 20)},
    kept={"TD": (7, 12), "TV": (1, 0), "T": (0, 20)},
    dots={"TD": (2, 0), "TV": (1, 0)},
    full=INPUT,
    joined={"TD": (3, 0), "TV": (1, 0)},
    reads_input=True,
)
VIT_HEAD = Costs(
    forward={"DV": 2, "D": 7, "V": 7},
    backward={"DV": 4, "D": 10, "V": 5},
    products=(("1", "D", "V", 1.0),),
    moved={"D": (2, 8), "V": (2, 8), "1": (0, 28)},
    back={"D": (2, 16), "V": (2, 8), "1": (0, 29)},
    kept={"D": (1, 12), "V": (1, 0), "1": (0, 20)},
    dots={"D": (1, 0), "V": (1, 0)},
    full={"D": (1, 0)},
    joined={"D": (2, 0), "V": (1, 0)},
)
