"""Who takes part in a comparison: names such as lmm, cnn or kmer-nb:k=6, as settings of a classifier."""

import dataclasses
import re
from typing import get_args

from titans_lm.compare.settings import FITTED, read_changes, stack_of
from titans_lm.config import Architecture, BackboneConfig, check_choice, nearest
from titans_lm.genomics.nucleotides import VOCAB_SIZE
from titans_lm.genomics.settings import COUNTED, Baseline, GenomicsFit
from titans_lm.train.match import count_parameters, match_parameters
from titans_lm.train.settings import merge_settings

SEQUENCES = ("max_length", "crop", "reverse_complement", "both_strands")
LEARNING = ("lr", "weight_decay", "steps", "embed_dropout")
VARIED = {
    "cnn": (*SEQUENCES, *LEARNING, "cnn_channels", "cnn_layers", "cnn_kernel"),
    "words": (*SEQUENCES, *LEARNING, "word_size"),
    "kmer-nb": (*SEQUENCES, "k"),
    "kmer-lr": (*SEQUENCES, "k"),
    "length": ("max_length", "crop"),
}
"""Settings that a variant of a baseline may change."""
BACKBONE = (*SEQUENCES, *LEARNING, "pooling", "stem_size", "word_size", "see_length", "pretrain_steps")
"""Settings that a variant of ours may change beside those of the backbone."""


def base_of(name: str) -> str:
    """Give what a contender is, without what is varied."""
    return name.partition(":")[0]


def is_network(name: str) -> bool:
    """Tell whether a contender learns by steps."""
    return base_of(name) not in COUNTED


def own_rate(name: str) -> bool:
    """Tell whether a contender's name says its learning rate."""
    _, colon, told = name.partition(":")
    return bool(colon) and "lr" in read_changes(name, told, "NAME")


def contender(shared: GenomicsFit, name: str, parameters: int | None = None) -> GenomicsFit:
    """Give the settings of one contender, from those that all share.

    A backbone gets the width and the MLP that give its stack as many parameters as asked for; all else of it goes by
    `stack_of`.
    ValueError for a name that is not known, and for what cannot be varied.
    """
    base, colon, told = name.partition(":")
    changes = read_changes(name, told, "NAME") if colon else {}
    check_choice("models", base, (*get_args(Architecture), *get_args(Baseline)))
    fitted = {"architecture", *FITTED}
    backbone = {field.name for field in dataclasses.fields(BackboneConfig)} - fitted
    ours = base in get_args(Architecture)
    known = [*BACKBONE, *sorted(backbone)] if ours else VARIED[base]
    for changed in changes:
        if changed not in known:
            raise ValueError(f"got {changed!r}, which a variant of {base!r} cannot change; {nearest(changed, known)}")
    own = {changed: value for changed, value in changes.items() if changed not in backbone}
    if not ours:
        kept = {"baseline": base, "pretrain_steps": 0, "pretrained": None}
        return dataclasses.replace(merge_settings(shared, own), **kept)
    varied = {changed: value for changed, value in changes.items() if changed in backbone}
    model = stack_of(shared.model, base, varied)
    if parameters is not None:
        model = match_parameters(model, VOCAB_SIZE, parameters)
    return merge_settings(dataclasses.replace(shared, model=model, baseline=None, parameters=None), own)


def shared_size(shared: GenomicsFit, names: tuple[str, ...]) -> int | None:
    """Count the parameters that all backbones shall have, as `match_parameters` counts: those of the first."""
    if shared.parameters is not None:
        return shared.parameters
    first = next((name for name in names if base_of(name) in get_args(Architecture)), None)
    return None if first is None else count_parameters(contender(shared, first).model, VOCAB_SIZE)


def folder_name(name: str) -> str:
    """Name a folder by a contender."""
    return re.sub(r"[^\w.=,-]", "-", name)
