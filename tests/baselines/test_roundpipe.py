"""RoundPipe: the model is cut as RoundPipe needs it, and the real package trains it, on a host that poses as its device."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from models import registry as models_registry
from systems.baselines.external.sequential import cut
from systems.baselines.external.weights import Masters, materialise
from systems.errors import UnsupportedError
from systems.ranks.ranks import SingleRank
from systems.recipe.model.units import find_units
from systems.settings import Settings
from tests.baselines.training import ROOT


@pytest.mark.parametrize(
    ("name", "changes"),
    [("opt-tiny", {}), ("opt-tiny", {"norm_first": "false", "embedding_size": "64"}), ("gpt-tiny", {})],
)
def test_the_sequence_computes_what_the_model_does(name: str, changes: dict[str, str]) -> None:
    shape = models_registry.resolve(name, {"num_layers": "2"} | changes)
    model, settings = models_registry.build(shape), Settings(initial_weights=models_registry.initial_weights(shape, 0))
    found = find_units(model)
    parameters = materialise(found, Masters(found, settings, SingleRank()), torch.float32)
    layers = cut(model, "roundpipe")
    assert {id(p) for p in layers.parameters()} == {id(p) for p in parameters}
    assert len(layers) == 2 + 2
    ids = torch.randint(0, shape.vocab_size, (2, 16), generator=torch.Generator().manual_seed(0))
    assert torch.equal(layers(ids), model(input_ids=ids).logits)


def test_a_model_that_nobody_has_cut() -> None:
    with pytest.raises(UnsupportedError, match="T5ForConditionalGeneration is not cut into one: take one of .*OPTForCausalLM"):
        cut(models_registry.build(models_registry.resolve("t5-tiny")), "roundpipe")


@pytest.mark.slow
@pytest.mark.timeout(1500)  # builds RoundPipe's Adam the first time
@pytest.mark.parametrize(("model", "dtype", "accumulate"), [("opt-tiny", "fp32", "2"), ("gpt-tiny", "bf16", "1")])
def test_the_real_package_trains_as_the_reference(model: str, dtype: str, accumulate: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.baselines.host_as_cuda", model, dtype, accumulate],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    tolerance = 1e-5 if dtype == "fp32" else 2e-2
    for way in ("fused", "called"):
        assert found[way]["losses"] == pytest.approx(found["resident"]["losses"], abs=tolerance)
        assert found[way]["norms"] == pytest.approx(found["resident"]["norms"], rel=tolerance)
        assert found[way]["end"] == pytest.approx(found["resident"]["end"], abs=1e-3 if dtype == "fp32" else 1.0)
    late = found["asynchronous"]["losses"]
    assert late[0] == pytest.approx(found["resident"]["losses"][0], abs=tolerance)
    assert late[2:] != pytest.approx(found["resident"]["losses"][2:], abs=1e-6)  # a step uses parameters a step older
