"""ViTForImageClassification; its patch embedding is a convolution [D, C, P, P]."""

from hexijax.weights.maps.torch import dense, norm
from hexijax.weights.names import Named, NameMap

_LAYER = "vit.encoder.layer.*"
_ATTENTION = f"{_LAYER}.attention"


def vit(*, channels: int = 3) -> NameMap:
    """The map for images of so many colours."""
    return NameMap(
        name="the name map 'vit'",
        prefix="vit.",
        table={
            "class_token": Named(
                name="vit.embeddings.cls_token",
                axes="one s d -> (one s) d",
                sizes={"one": 1},
            ),
            "positions": Named(
                name="vit.embeddings.position_embeddings",
                axes="one s d -> (one s) d",
                sizes={"one": 1},
            ),
            "patch/kernel": Named(
                name="vit.embeddings.patch_embeddings.projection.weight",
                axes="d c p q -> (p q c) d",
                sizes={"c": channels},
                square=("p", "q"),
            ),
            "patch/bias": "vit.embeddings.patch_embeddings.projection.bias",
            **norm("blocks/*/attention_norm", f"{_LAYER}.layernorm_before"),
            **dense("blocks/*/attention/query", f"{_ATTENTION}.attention.query"),
            **dense("blocks/*/attention/key", f"{_ATTENTION}.attention.key"),
            **dense("blocks/*/attention/value", f"{_ATTENTION}.attention.value"),
            **dense("blocks/*/attention/out", f"{_ATTENTION}.output.dense"),
            **norm("blocks/*/ff_norm", f"{_LAYER}.layernorm_after"),
            **dense("blocks/*/ff/up", f"{_LAYER}.intermediate.dense"),
            **dense("blocks/*/ff/down", f"{_LAYER}.output.dense"),
            **norm("norm", "vit.layernorm"),
            **dense("head", "classifier"),
        },
        unused=("*pooler.dense.*",),
    )


VIT = vit()
