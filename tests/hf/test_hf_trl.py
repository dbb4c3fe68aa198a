"""TRL's trainers take a model by its path: texts packed or not, preferences, rewards."""

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from hf.hf_cases import small_model
from titans_lm.data.tokenizer import byte_tokenizer

trl = pytest.importorskip("trl", reason="TRL is not installed (pip install trl)")
pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's own, and those of what it imports

TEXTS = Dataset.from_dict({"text": [f"text {i} " * (1 + i % 3) for i in range(6)]})
PAIRS = Dataset.from_dict({"prompt": ["hi"] * 4, "chosen": [" yes"] * 4, "rejected": [" no"] * 4})
REWARDS = Dataset.from_dict({"chosen": ["hi yes"] * 4, "rejected": ["hi no no"] * 4})


@pytest.fixture
def path(tmp_path: Path) -> str:
    tokenizer = byte_tokenizer()
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    small_model("mac", vocab_size=259, **ids).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize(
    ("kind", "data", "settings"),
    [
        ("SFT", TEXTS, {}),
        ("SFT", TEXTS, {"packing": True, "max_length": 48}),
        ("SFT", TEXTS, {"padding_free": True, "max_length": None}),
        ("DPO", PAIRS, {}),
        ("Reward", REWARDS, {}),
    ],
    ids=["SFT", "SFT packed", "SFT without padding", "DPO without a reference", "reward"],
)
def test_a_trainer_takes_the_path_of_a_model(
    kind: str, data: Dataset, settings: dict[str, Any], path: str, tmp_path: Path
) -> None:
    few = {"max_steps": 1, "per_device_train_batch_size": 2, "use_cpu": True, "report_to": [], "save_strategy": "no"}
    arguments = getattr(trl, f"{kind}Config")(output_dir=str(tmp_path / "out"), **few, **settings)
    trainer = getattr(trl, f"{kind}Trainer")(path, args=arguments, train_dataset=data)
    assert trainer.train().training_loss > 0.0
