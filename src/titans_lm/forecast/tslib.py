"""Our forecaster with the signature of the models of thuml/Time-Series-Library.

In a checkout of that library, a file `models/Titans.py` with `from titans_lm.forecast.tslib import Model` in it makes
`--model Titans` one of its models.
"""

from typing import Any

from torch import Tensor, nn

from titans_lm.config import BackboneConfig
from titans_lm.forecast.model import Forecaster, Shape
from titans_lm.forecast.settings import NetSettings

TASKS = ("long_term_forecast", "short_term_forecast")


class Model(nn.Module):
    """A forecaster that is made from that library's arguments and called as its models are.

    Taken from the arguments: seq_len, pred_len, enc_in, d_model, n_heads, e_layers, d_ff, dropout, patch_len (where
    there is one), and `architecture` (lmm, mac, mag, mal, tnt, attention, sliding, hybrid; lmm where there is none).
    Patches overlap by half, as that library's do; the shortcut starts at zero. ValueError for a task that is no
    forecast.
    """

    def __init__(self, configs: Any) -> None:
        super().__init__()
        task = getattr(configs, "task_name", TASKS[0])
        if task not in TASKS:
            raise ValueError(f"got task_name={task!r}; expected {' or '.join(TASKS)}")
        patch = min(getattr(configs, "patch_len", NetSettings().patch_len), configs.seq_len)
        backbone = BackboneConfig(
            architecture=getattr(configs, "architecture", "lmm"), hidden_size=configs.d_model,
            num_attention_heads=configs.n_heads, num_hidden_layers=configs.e_layers, intermediate_size=configs.d_ff,
            memory_expansion=2, chunk_size=2, segment_len=4, window=64, num_persistent=4,
        )  # fmt: skip
        net = NetSettings(
            patch_len=patch, stride=max(1, patch // 2), dropout=configs.dropout, shortcut="linear", backbone=backbone
        )
        self.forecaster = Forecaster(net, Shape(configs.seq_len, configs.pred_len, configs.enc_in))

    def forward(self, x_enc: Tensor, *others: Tensor | None, **named: Tensor | None) -> Tensor:
        """Forecast (B, pred_len, C) from x_enc (B, seq_len, C); marks of time and the decoder's input are not read."""
        return self.forecaster(x_enc)
