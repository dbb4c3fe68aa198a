"""A class, or a score, for a whole text: the trunk of a language model and a linear map of its last real token."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from titans_lm.hf.configuration import TitansConfig
from titans_lm.hf.modeling import TitansModel, TitansOutput, TitansPreTrainedModel, last_places
from titans_lm.layers import Linear


class TitansForSequenceClassification(TitansPreTrainedModel):
    """`config.num_labels` scores (B, num_labels) from each row's last real token, which has read the whole text.

    `forward(…)` takes what `TitansModel.forward` takes, and `labels` (B,), or (B, num_labels) for several classes at
    once. Without a mask, `pad_token_id` of the config says which tokens of input_ids are padding.
    """

    def __init__(self, config: TitansConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = TitansModel(config)
        self.score = Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()

    accepts_loss_kwargs = False
    """The loss is a mean over rows, which Trainer divides among the batches of a step."""

    def forward(
        self,
        input_ids: Int[Tensor, "B T"] | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        inputs_embeds: Float[Tensor, "B T E"] | None = None,
        position_ids: Tensor | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> TitansOutput | tuple:
        """Score every row; raises ValueError for a row without a token.

        What a data set may have as columns stands here by name: Trainer drops all others.
        """
        others.pop("num_items_in_batch", None)
        pad = self.config.pad_token_id
        if attention_mask is None and input_ids is not None and pad is not None:
            attention_mask = input_ids != pad
        trunk = self.model(
            input_ids,
            attention_mask,
            inputs_embeds=inputs_embeds,
            position_ids=position_ids,
            return_dict=True,
            **others,
        )
        hidden = trunk.last_hidden_state
        T = hidden.shape[1]
        if T == 0 or (attention_mask is not None and not bool((attention_mask[:, -T:] != 0).any(1).all())):
            raise ValueError("got a row without a real token; expected at least one, whose output is scored")
        logits = self.score(last_places(hidden, 1, attention_mask)[:, 0]).to(
            torch.promote_types(hidden.dtype, torch.float32)
        )
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config)
        return self._output(loss, logits, trunk, return_dict)
