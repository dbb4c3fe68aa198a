"""Labels: which of them are a loss, and which cannot be those of a call's logits."""

from typing import Any

import torch
from torch import Tensor

from titans_lm.config import check_choice
from titans_lm.ops.validate import form

REGRESSION, ONE, SEVERAL = "regression", "single_label_classification", "multi_label_classification"


def kept_places(mask: Tensor | None, length: int, keep: int | Tensor) -> Tensor | None:
    """Which of the places that get logits hold a real token, of a call of `length` tokens."""
    if mask is None or length == 0:
        return None
    real = mask[:, mask.shape[1] - length :] != 0
    return real[:, -keep:] if isinstance(keep, int) else real[:, keep]


def predicted(labels: Tensor | None, logits: Tensor, real: Tensor | None, settings: dict[str, Any]) -> Tensor | None:
    """Labels without those behind padding: what is predicted from padding says nothing of the model, and is no loss."""
    ignored, shifted, places = settings.get("ignore_index", -100), settings.get("shift_labels"), logits.shape[:2]
    for name, given in (("labels", labels), ("shift_labels", shifted)):
        fits = isinstance(given, Tensor) and given.shape == places and given.dtype == torch.int64
        if given is not None and not fits:
            raise ValueError(
                f"got {name} {form(given)} for logits at {tuple(places)} places; expected as many token ids, in int64"
            )
    if real is None:
        return labels
    if shifted is not None:
        settings["shift_labels"] = shifted.masked_fill(~real.to(shifted.device), ignored)
    if labels is None:
        return None
    behind = ~real[:, :-1].to(labels.device)
    return torch.cat([labels[:, :1], labels[:, 1:].masked_fill(behind, ignored)], dim=1)


def check_classes(labels: Any, logits: Tensor, problem: str | None) -> None:
    """Refuse labels of another form than the kind of problem has, which without a word transformers tells by them."""
    B, N = logits.shape
    if not isinstance(labels, Tensor):
        raise ValueError(
            f"got labels {form(labels)} for {B} rows; expected a tensor, of classes or of {(B, N)} numbers"
        )
    whole, told = not labels.dtype.is_floating_point, problem is not None
    problem = problem or (REGRESSION if N == 1 else ONE if whole else SEVERAL)
    check_choice("problem_type", problem, (REGRESSION, ONE, SEVERAL))
    shapes = [(B,), (B, 1)] if problem == ONE or (problem == REGRESSION and N == 1) else [(B, N)]
    right = tuple(labels.shape) in shapes
    if right and problem != REGRESSION:
        right = labels.dtype == torch.int64 if problem == ONE else not whole
    if not right:
        raise ValueError(
            f"got labels {form(labels)} for {B} rows and {N} scores each; expected for {problem} "
            + (f"int64 ({B},), the class of each row" if problem == ONE else f"floating point {shapes[0]}")
            + (f" (or int64 ({B},) for one class a row)" if problem == SEVERAL else "")
            + (f" (or floating point {(B, N)} for several classes a row)" if problem == ONE and not told else "")
        )
