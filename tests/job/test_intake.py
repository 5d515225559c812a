"""What is planned is what the experiment says, and its data fits its model."""

import dataclasses

import pytest

from hexijax.data import RandomTokens, TextBytes
from hexijax.errors import UserError
from hexijax.job.intake import trace_chain
from tests.cli import tiny


def test_a_chain_knows_which_rows_a_batch_picks():
    batch = trace_chain(tiny.experiment()).batch
    assert (batch["inputs"].rows, batch["inputs"].picks) == (16, "embed/embedding")
    assert batch["targets"].rows is None  # a loss compares them


@pytest.mark.parametrize(
    "field", ["data", pytest.param("eval_data", marks=pytest.mark.laws)]
)
def test_data_with_more_tokens_than_the_model_has_rows_is_refused(field: str):
    fits = tiny.experiment()
    for data, tokens in [(RandomTokens(17, 4), "17"), (TextBytes(None, 4), "256")]:
        with pytest.raises(
            UserError,
            match=rf"Experiment.{field} has a vocabulary of {tokens} tokens, and the "
            "model's embed/embedding has 16 rows. Name the tokenizer that the model",
        ):
            trace_chain(dataclasses.replace(fits, **{field: data}))
    trace_chain(dataclasses.replace(fits, **{field: RandomTokens(16, 4)}))
