"""titans-lm at home in Hugging Face: importing this package registers the Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from titans_lm.hf.cache import TitansCache
from titans_lm.hf.configuration import TitansConfig
from titans_lm.hf.modeling import TitansForCausalLM, TitansForSequenceClassification, TitansModel

__all__ = ["TitansCache", "TitansConfig", "TitansForCausalLM", "TitansForSequenceClassification", "TitansModel"]

AutoConfig.register(TitansConfig.model_type, TitansConfig)
AutoModel.register(TitansConfig, TitansModel)
AutoModelForCausalLM.register(TitansConfig, TitansForCausalLM)
AutoModelForSequenceClassification.register(TitansConfig, TitansForSequenceClassification)
# Trainer knows by this table whose labels are to be shifted where it smooths them.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(TitansConfig.model_type, TitansForCausalLM.__name__)
