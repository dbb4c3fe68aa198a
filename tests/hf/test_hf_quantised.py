"""Weights in 8 bits by torchao: maps are called as the modules they are, states stay what they were."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, TorchAoConfig

from hf.hf_cases import GREEDY, prompt, small_model

quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed (pip install torchao)")
pytestmark = pytest.mark.filterwarnings("ignore")  # torchao's own


@pytest.mark.parametrize("architecture", ["lmm", "mac", "mag", "attention", "mac, shared"])
def test_a_model_in_8_bits_is_nearly_the_model(architecture: str, tmp_path: Path) -> None:
    model, ids = small_model(architecture, hidden_size=32), prompt(21, 2)
    expected = model(ids).logits
    model.save_pretrained(tmp_path)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    logits = model(ids).logits
    assert 0.0 < (logits - expected).norm() < 0.1 * expected.norm()
    assert model.generate(ids, max_new_tokens=3, **GREEDY).shape == (2, 24)
    settings = TorchAoConfig(quantization.Int8WeightOnlyConfig())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=settings)
    loaded.save_pretrained(tmp_path / "int8")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "int8")
    assert type(again.model.backbone.layers[0].mlp.up_proj.weight) is not torch.nn.Parameter
    torch.testing.assert_close(again(ids).logits, loaded(ids).logits, rtol=1e-3, atol=1e-4)
