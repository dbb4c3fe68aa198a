"""transformers' own tests of models and of `generate()`, for every architecture, with flags as Mamba's tests have."""

import unittest
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers.models.auto import modeling_auto

from hf.conformance import load_mixins
from hf.hf_cases import SIZES, VOCABULARY
from model_cases import assert_close, stack_named
from titans_lm.hf import TitansCache, TitansConfig, TitansForCausalLM, TitansForSequenceClassification, TitansModel
from titans_lm.ops.state import state_tensors

ModelTesterMixin, GenerationTesterMixin = load_mixins()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # transformers' own
    pytest.mark.usefixtures("unchecked"),  # called as users call it
]

CLASSES = {
    "MODEL_MAPPING_NAMES": TitansModel,
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": TitansForCausalLM,
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": TitansForSequenceClassification,
}
CHECKPOINTING = unittest.skip(
    "looks for GradientCheckpointingLayer, a module of transformers; blocks here are of torch alone "
    "(test_gradient_checkpointing_changes_nothing_and_is_used says what this says)"
)


class Small:
    """What the mixins ask for: small configs and inputs."""

    batch_size, seq_length, is_training = 3, 11, True
    hidden_size, num_hidden_layers = SIZES["hidden_size"], SIZES["num_hidden_layers"]

    def __init__(self, architecture: str) -> None:
        self.stack = stack_named(architecture)
        self.num_hidden_layers = self.stack.get("num_hidden_layers", self.num_hidden_layers)

    def get_config(self) -> TitansConfig:
        ids = {"bos_token_id": VOCABULARY - 1, "eos_token_id": VOCABULARY - 1, "pad_token_id": VOCABULARY - 1}
        return TitansConfig(**SIZES | ids | self.stack)

    def prepare_config_and_inputs_for_common(self) -> tuple[TitansConfig, dict[str, Tensor]]:
        ids = torch.randint(0, VOCABULARY - 1, (self.batch_size, self.seq_length))
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class Conformance(ModelTesterMixin, GenerationTesterMixin):
    architecture: str
    all_model_classes = tuple(CLASSES.values())
    has_attentions = False  # as Mamba's: what asks for attention's weights
    test_missing_keys = False  # as Mamba's: a tied head misses none
    test_can_init_all_missing_weights_before_2023 = True  # the suite reads a year that our files do not bear

    def setUp(self) -> None:
        self.model_tester = Small(self.architecture)
        for mapping, model_class in CLASSES.items():  # by these names the suite knows which class takes which labels
            names = mock.patch.dict(getattr(modeling_auto, mapping), {"titans": model_class.__name__})
            names.start()
            self.addCleanup(names.stop)

    @unittest.skipUnless(
        hasattr(GenerationTesterMixin, "test_left_padding_compatibility"),
        "transformers' tests of generate() are not in its sdist (TRANSFORMERS_TESTS names a checkout)",
    )
    def test_left_padding_compatibility(self) -> None:
        self.has_attentions = True  # the suite's word for "can be padded" here
        super().test_left_padding_compatibility()

    def _check_past_key_values_for_generate(
        self, batch_size: int, past_key_values: TitansCache, seq_length: int, config: TitansConfig
    ) -> None:
        """The state of the whole stack stands where others have keys and values of every layer."""
        assert isinstance(past_key_values, TitansCache)
        assert past_key_values.get_seq_length() == seq_length
        assert past_key_values.state.position.tolist() == [seq_length] * batch_size

    def _check_caches_are_equal(self, cache1: TitansCache, cache2: TitansCache) -> None:
        assert cache1.get_seq_length() == cache2.get_seq_length()
        for a, b in zip(state_tensors(cache1.state), state_tensors(cache2.state), strict=True):
            assert_close(a, b, 1e-5)

    @CHECKPOINTING
    def test_gradient_checkpointing_enable_disable(self) -> None: ...

    @CHECKPOINTING
    def test_training_gradient_checkpointing(self) -> None: ...

    @CHECKPOINTING
    def test_training_gradient_checkpointing_use_reentrant_false(self) -> None: ...

    @CHECKPOINTING
    def test_training_gradient_checkpointing_use_reentrant_true(self) -> None: ...


class Memoryless(Conformance):
    @unittest.skip("wants weights by every name that is kept in float32, and `initial` is a memory's")
    def test_keep_in_fp32_modules_exist(self) -> None: ...


class TestLMM(Conformance, unittest.TestCase):
    architecture = "lmm"


class TestMAC(Conformance, unittest.TestCase):
    architecture = "mac"


class TestMAG(Conformance, unittest.TestCase):
    architecture = "mag"


class TestMAL(Conformance, unittest.TestCase):
    architecture = "mal"


class TestAttention(Memoryless, unittest.TestCase):
    architecture = "attention"


class TestSliding(Memoryless, unittest.TestCase):
    architecture = "sliding"


class TestSegment(Memoryless, unittest.TestCase):
    architecture = "segment"


class TestHybrid(Conformance, unittest.TestCase):
    architecture = "sliding+mac"
