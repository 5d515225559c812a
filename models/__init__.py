"""Flax models to train, written as anyone would: none knows where it will run.

    models.gpt, models.llama, models.bert, models.vit    NNX modules and their configs
    models.linen_gpt                                     the same GPT in Linen
    models.losses                                        per-sample sums for training
    models.sizes                                         published shapes by name
    models.abstract                                      shapes of a model, no memory

Parameters are float32 always; a layer casts its weights to the config's ``dtype``
when it uses them, and logits leave in that dtype. Batch is the first dim of every
activation.
Import the module that you need: this package imports nothing by itself.
"""
