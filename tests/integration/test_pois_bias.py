"""benchmarks/paper/pois_bias.py: its estimates by hand, and a measurement made for real."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_model

FOLDER = Path(__file__).parents[2] / "benchmarks" / "paper"


@pytest.fixture(scope="module")
def pois_bias():
    """Import the script as if it were started from its folder."""
    names = {path.stem for path in FOLDER.glob("*.py")}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("pois_bias")
    for name in names & sys.modules.keys():
        del sys.modules[name]


def test_comparison_takes_the_noise_out(pois_bias):
    # True (3, 0), stale (4, 4), each estimated twice with noise of its own in directions 3 to 6.
    noisy = torch.eye(6)[2:] * 5
    true = [torch.tensor([3.0, 0, 0, 0, 0, 0]) + noisy[0], torch.tensor([3.0, 0, 0, 0, 0, 0]) + noisy[1]]
    stale = [torch.tensor([4.0, 4, 0, 0, 0, 0]) + noisy[2], torch.tensor([4.0, 4, 0, 0, 0, 0]) + noisy[3]]
    found = pois_bias.comparison(true, stale)
    assert found["cosine"] == pytest.approx(0.5**0.5)  # 12 / (3 x sqrt 32)
    assert found["length_ratio"] == pytest.approx(32**0.5 / 3)
    assert found["plain_cosine"] == pytest.approx(12 / (34 * 57) ** 0.5)
    assert pois_bias.comparison(true, [stale[0], -stale[1]])["cosine"] is None


def test_losses_by_hand(pois_bias):
    current, old = torch.tensor([0.5, 0.5, 0.5]).log().requires_grad_(), torch.tensor([0.5, 0.4, 0.8]).log()
    gradients = {
        mode: torch.autograd.grad(pois_bias.token_losses(current, old, torch.tensor(1.0), mode).sum(), current)[0]
        for mode in ("pois", "sais")
    }
    assert gradients["pois"].tolist() == [-1.0, -1.0, -1.0]  # REINFORCE's
    # Ratios 1, 1.25 (above 1.2 with a positive advantage: clipped) and 0.625 (below 0.8: weighted, not clipped).
    assert gradients["sais"].tolist() == pytest.approx([-1.0, 0.0, -0.625])


def test_modes_agree_where_nothing_is_stale(pois_bias):
    model, rng = make_model(), np.random.default_rng(0)
    samples = []
    for length in (5, 9, 7, 3):
        ids = rng.integers(4, 20, 4 + length)
        with torch.no_grad():
            logps = torch.log_softmax(model(torch.from_numpy(ids)[None]).logits[0] / 0.85, dim=-1)
        sampled = logps[torch.arange(3, 3 + length), torch.from_numpy(ids[4:])].numpy()
        samples.append(pois_bias.Sample(ids[:4], ids[4:], sampled, np.zeros(length, np.int64), True))
    advantages = torch.tensor([1.0, -0.5, 0.0, 2.0])
    found, sums = pois_bias.gradients(model, samples, advantages, temperature=0.85, num_stats_ages=2)
    torch.testing.assert_close(found["pois"], found["sais"], rtol=1e-4, atol=1e-5)
    assert sums[:, 0].tolist() == [5 + 9 + 3, 0]  # the completion without an advantage is left out
    # The gradient of - sum_t A log p / tokens.
    model.zero_grad()
    for sample, advantage in zip(samples, advantages, strict=True):
        ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.token_ids]))
        logps = torch.log_softmax(model(ids[None]).logits[0, 3:-1] / 0.85, dim=-1)
        (-advantage * logps.gather(1, ids[4:, None]).sum() / 17).backward()
    expected = torch.cat([value.grad.flatten() for value in model.parameters()])
    torch.testing.assert_close(found["pois"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_reduced_measurement(pois_bias, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.import_module("runs"), "RUNS", tmp_path / "runs")
    arguments = ["--steps", "1", "--seeds", "1", "--problems", "16", "--jobs", "1", "--learning-rates", "1e-3"]
    monkeypatch.setattr(sys, "argv", ["pois_bias.py", *arguments, "--output", str(tmp_path)])
    pois_bias.main()
    (rate,) = json.loads((tmp_path / "pois_bias.json").read_text())["learning_rates"].values()
    arms = rate["arms"]
    assert arms.keys() == {"age 0", "age 1"}
    fresh, old = arms["age 0"], arms["age 1"]
    assert rate["control"]["mean"] > 0.3 and fresh["pois"]["plain_cosine"]["mean"] > 0.3
    assert fresh["pois"]["cosine"]["mean"] == pytest.approx(fresh["sais"]["cosine"]["mean"], abs=1e-3)
    assert fresh["stale_kl"]["mean"] < 1e-6
    # The first update is made at a learning rate of 0 (warm-up), so the data are no older than they look.
    assert old["stale_kl"]["mean"] < 1e-6
    assert (tmp_path / "pois_bias.png").stat().st_size > 5000
