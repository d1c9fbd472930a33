"""The engine on `model.generate`, driven by itself."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from conftest import make_model
from transformers import GenerationConfig, set_seed

from trl_ulorl.rollout import transformers as module
from trl_ulorl.rollout.engine import DecodeRequest
from trl_ulorl.rollout.transformers import TransformersEngine

pytestmark = pytest.mark.slow


def make_engine(model):
    @contextmanager
    def generation_model():
        with torch.no_grad():
            yield model

    return TransformersEngine(
        generation_model=generation_model,
        generation_config=GenerationConfig(do_sample=True, temperature=0.85, top_k=0, eos_token_id=1, pad_token_id=0),
        eos_token_ids=[1],
        pad_token_id=0,
        max_batch_size=4,
    )


def prefixes(*lengths):
    rng = np.random.default_rng(0)
    return [DecodeRequest(rng.integers(4, 20, length).astype(np.int32), 6) for length in lengths]


@pytest.mark.parametrize(("lengths", "is_padded"), [((60, 13, 40), True), ((60, 60, 60), False)])
def test_a_padded_prefix_goes_through_in_chunks_with_the_same_result(lengths, is_padded, monkeypatch):
    model = make_model()
    requests = prefixes(*lengths)
    results, columns = [], []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: columns.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    for cells in (2**26, 3 * 7 * 60):
        monkeypatch.setattr(module, "_MOST_MASK_CELLS", cells)
        set_seed(7)
        columns.clear()
        results.append(sorted(make_engine(model).decode(requests), key=lambda segment: segment.request_index))
    chunks = [7] * 8 + [4] if is_padded else [60]  # of 60 columns; rows of equal length need no mask
    assert columns[: len(chunks)] == chunks and set(columns[len(chunks) :]) == {1}
    for whole, chunked in zip(*results, strict=True):
        np.testing.assert_array_equal(whole.token_ids, chunked.token_ids)
        np.testing.assert_allclose(whole.per_token_logps, chunked.per_token_logps, atol=1e-5)
