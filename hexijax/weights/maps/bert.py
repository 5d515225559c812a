"""BertForMaskedLM; the pooler and the next-sentence head are of no use to it."""

from hexijax.weights.maps.torch import dense, norm
from hexijax.weights.names import NameMap

_LAYER = "bert.encoder.layer.*"
_ATTENTION = f"{_LAYER}.attention"

BERT = NameMap(
    name="the name map 'bert'",
    prefix="bert.",
    table={
        "embed/embedding": "bert.embeddings.word_embeddings.weight",
        "positions": "bert.embeddings.position_embeddings.weight",
        "token_types/embedding": "bert.embeddings.token_type_embeddings.weight",
        **norm("embed_norm", "bert.embeddings.LayerNorm"),
        **dense("blocks/*/attention/query", f"{_ATTENTION}.self.query"),
        **dense("blocks/*/attention/key", f"{_ATTENTION}.self.key"),
        **dense("blocks/*/attention/value", f"{_ATTENTION}.self.value"),
        **dense("blocks/*/attention/out", f"{_ATTENTION}.output.dense"),
        **norm("blocks/*/attention_norm", f"{_ATTENTION}.output.LayerNorm"),
        **dense("blocks/*/ff/up", f"{_LAYER}.intermediate.dense"),
        **dense("blocks/*/ff/down", f"{_LAYER}.output.dense"),
        **norm("blocks/*/ff_norm", f"{_LAYER}.output.LayerNorm"),
        **dense("transform", "cls.predictions.transform.dense"),
        **norm("norm", "cls.predictions.transform.LayerNorm"),
        "logits_bias": "cls.predictions.bias",
    },
    old={"gamma": "weight", "beta": "bias"},
    copies={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    unused=(
        "*embeddings.position_ids",
        "*pooler.dense.*",
        "cls.seq_relationship.*",
    ),
)
