"""A saved model in the hands of somebody whose program does not import titans_lm."""

import os
import subprocess
import sys
from pathlib import Path

from transformers import AutoConfig

from hf.hf_cases import prompt, small_model, words
from titans_lm.hf import TitansConfig

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, pipeline
path = sys.argv[1]
class Lacks:
    def find_spec(self, name, *_):
        if name == "titans_lm":
            raise ModuleNotFoundError("No module named 'titans_lm'", name=name)
sys.meta_path.insert(0, Lacks())  # as if it were not installed
try:
    AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)
except ImportError as error:
    print(error)
del sys.meta_path[0]  # installed in the meantime
print("---")
model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)
ids = torch.tensor([[3, 4, 5]])
print(model(ids).logits.sum().item())
model.save_pretrained(path + "/again")
write = pipeline("text-generation", model=path + "/again", trust_remote_code=True)
print(len(write("w3 w4", max_new_tokens=2, do_sample=False)[0]["generated_text"]) > 0)
print(AutoModelForSequenceClassification.from_pretrained(path, trust_remote_code=True)(ids).logits.shape[0])
"""


def run(path: Path) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_MODULES_CACHE": str(path / "modules")}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_stranger_is_told_what_to_install_and_loads_a_model_that_says_where_its_code_is(tmp_path: Path) -> None:
    model = small_model("mac")
    model.config.pad_token_id = 0
    model.save_pretrained(tmp_path)
    words().save_pretrained(tmp_path)
    words().save_pretrained(tmp_path / "again")
    told, said = run(tmp_path).split("---")
    assert "this model needs titans-lm, which is not installed; expected it beside" in told
    total, written, rows = said.split()
    assert float(total) == model(prompt(3) * 0 + prompt(3).new_tensor([3, 4, 5])).logits.sum().item()
    assert (written, rows) == ("True", "1")
    stub = (tmp_path / "modeling_titans_lm.py").read_text()
    assert stub == (tmp_path / "again" / "modeling_titans_lm.py").read_text()
    assert not list((tmp_path / "again").glob("configuration*.py")), "the stub and no other code"


def test_here_the_package_itself_is_loaded(tmp_path: Path) -> None:
    small_model("mac").save_pretrained(tmp_path)
    for trust in (None, True, False):
        config = AutoConfig.from_pretrained(tmp_path, trust_remote_code=trust)
        assert type(config) is TitansConfig
    assert config.auto_map["AutoModelForCausalLM"] == "modeling_titans_lm.TitansForCausalLM"
