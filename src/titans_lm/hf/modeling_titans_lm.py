"""What `from_pretrained(path, trust_remote_code=True)` runs: the way to titans-lm, which has the model's code.

`save_pretrained` writes a copy of this file beside a model. Nothing of the model is in it.
"""

try:
    from titans_lm.hf import TitansConfig, TitansForCausalLM, TitansForSequenceClassification, TitansModel
except ModuleNotFoundError as error:
    if error.name != "titans_lm":
        raise
    raise ImportError(
        "this model needs titans-lm, which is not installed; expected it beside transformers: get its source, run "
        "`pip install .` in its folder, and load the model again"
    ) from error

__all__ = ["TitansConfig", "TitansForCausalLM", "TitansForSequenceClassification", "TitansModel"]
