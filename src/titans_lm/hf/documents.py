"""Several documents in one row: cut apart by what clients say of them, read side by side, and put back into place."""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from titans_lm.backbone import Backbone, BackboneState
from titans_lm.layers import Diagnostics
from titans_lm.ops.state import map_state, repeat_rows, take_rows

Hidden = Float[Tensor, "B T E"]


class Documents(NamedTuple):
    """The documents of a batch of packed rows, (N,) each: where they are, and which row each belongs to.

    `of_token` and `place` (B, T) say to which document a token belongs and how far into it. `continues` marks those
    that go on where the state of their row stands.
    """

    of_token: Int[Tensor, "B T"]
    place: Int[Tensor, "B T"]
    lengths: Int[Tensor, " N"]
    row: Int[Tensor, " N"]
    continues: Bool[Tensor, " N"]

    @classmethod
    def of(cls, starts: Bool[Tensor, "B T"], resets: Bool[Tensor, " B"]) -> "Documents":
        """Cut rows where documents start; `resets` says of each row whether its first one starts anew."""
        first = F.pad(starts[:, 1:], [1, 0], value=True)
        of_token = (first.flatten().cumsum(0) - 1).view(first.shape)
        begins = first.flatten().nonzero()[:, 0]
        lengths = torch.diff(begins, append=begins.new_tensor([first.numel()]))
        place = torch.arange(first.numel(), device=first.device).view(first.shape) - begins[of_token]
        row, T = begins // first.shape[1], first.shape[1]
        return cls(of_token, place, lengths, row, (begins % T == 0) & ~resets[row])

    def groups(self) -> list[Int[Tensor, " _"]]:
        """Documents of about one length together, so that no more than half of a group is padding."""
        sizes = torch.tensor([int(length).bit_length() for length in self.lengths.tolist()], device=self.row.device)
        return [(sizes == size).nonzero()[:, 0] for size in sizes.unique().tolist()]

    def last(self) -> Int[Tensor, " B"]:
        """The last document of every row."""
        return self.of_token[:, -1]


def starts_by_position(
    position_ids: Tensor, x: Hidden, valid: Bool[Tensor, "B T"] | None, read: Int[Tensor, " B"] | None
) -> tuple[Bool[Tensor, "B T"], Bool[Tensor, " B"]] | None:
    """Where positions begin at 0 again, and the rows that begin so; None where nothing begins but what a call begins.

    `read` counts the tokens that the state has read. Raises ValueError for positions that neither count on nor restart.
    """
    B, T = x.shape[:2]
    if position_ids.dim() != 2 or position_ids.shape[0] not in (1, B) or position_ids.shape[1] != T:
        raise ValueError(f"got position_ids {tuple(position_ids.shape)}; expected (B, T) = ({B}, {T}) or (1, {T})")
    position_ids = position_ids.to(x.device).expand(B, T)
    real = torch.ones_like(position_ids, dtype=torch.bool) if valid is None else valid
    before = torch.zeros(B, dtype=torch.long, device=x.device) if read is None else read
    order = real.cumsum(1) - 1  # of a token among the real ones of its row
    starts = (position_ids == 0) & real
    anew = torch.where(starts, order, -1).cummax(1).values  # the last start before a token, −1 for none
    expected = torch.where(anew < 0, before[:, None] + order, order - anew)
    wrong = (position_ids != expected) & real
    if bool(wrong.any()):
        row, token = (int(i) for i in wrong.nonzero()[0])
        raise ValueError(
            f"got position_ids {int(position_ids[row, token])} at token {token} of row {row}; expected "
            f"{int(expected[row, token])}: positions count up by 1 from 0, and a 0 inside a row starts a document; "
            "leave position_ids out where nothing restarts"
        )
    first = starts & (order == 0)
    inside = starts & ~first
    resets = first.any(1) & (before > 0)
    return (inside, resets) if bool(inside.any() | resets.any()) else None


def starts_by_index(seq_idx: Tensor, x: Hidden, valid: Bool[Tensor, "B T"] | None) -> Bool[Tensor, "B T"]:
    """Where the number of a token's document is another than that of the real token before it; padding starts none."""
    if seq_idx.shape != x.shape[:2]:
        raise ValueError(f"got seq_idx {tuple(seq_idx.shape)}; expected (B, T) = {tuple(x.shape[:2])}")
    seq_idx = seq_idx.to(x.device)
    if valid is None:
        return F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], [1, 0], value=True)
    places = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
    before = F.pad(torch.where(valid, places, -1).cummax(1).values[:, :-1], [1, 0], value=-1)  # −1 for none
    starts = valid & (before >= 0) & (seq_idx != seq_idx.gather(1, before.clamp(min=0)))
    starts[:, 0] = True
    return starts


def starts_by_length(cu_seq_lens: Tensor, x: Hidden) -> Bool[Tensor, "B T"]:
    """Where documents start by their cumulative lengths, 0 first and the number of all tokens last, in a single row."""
    ends, (B, T) = cu_seq_lens.tolist(), x.shape[:2]
    if B != 1 or ends[0] != 0 or ends[-1] != T or any(a > b for a, b in pairwise(ends)):
        raise ValueError(
            f"got cu_seq_lens {ends[:8]} for hidden states of {B} rows and {T} tokens; expected one row and lengths "
            f"added up from 0 to {T}"
        )
    starts = torch.zeros(1, T, dtype=torch.bool, device=x.device)
    starts[0, [end for end in ends[:-1] if end < T]] = True
    return starts


def read_documents(
    backbone: Backbone,
    x: Hidden,
    state: BackboneState | None,
    valid: Bool[Tensor, "B T"] | None,
    documents: Documents,
    diagnostics: Diagnostics | None,
) -> tuple[Hidden, BackboneState]:
    """Read every document as if alone; outputs in their places, and the state after each row's last document."""
    real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if valid is None else valid
    last, outputs, states, told = documents.last(), torch.zeros_like(x), [], []
    for group in documents.groups():
        among = torch.full_like(documents.lengths, -1).index_copy(0, group, torch.arange(len(group), device=x.device))
        here = among[documents.of_token]
        mine = here >= 0
        at = here[mine], documents.place[mine]
        size = len(group), int(documents.lengths[group].max())
        rows = x.new_zeros(*size, x.shape[-1]).index_put(at, x[mine])
        mask = torch.zeros(size, dtype=torch.bool, device=x.device).index_put(at, real[mine])
        start = _start(backbone, state, documents, group)
        found = None if diagnostics is None else Diagnostics(diagnostics.surprise)
        y, after = backbone(rows, start, mask, found)
        outputs = outputs.index_put((mine,), y[at])
        states.append((group, after))
        told.append((mine, at, found))
    if diagnostics is not None:
        _put_back(diagnostics, told, x)
    return outputs, _pick(states, last)


def _start(
    backbone: Backbone, state: BackboneState | None, documents: Documents, group: Int[Tensor, " _"]
) -> BackboneState | None:
    """The state before each document of a group: that of its row where it goes on, else that of a start."""
    goes_on = documents.continues[group]
    if state is None or not bool(goes_on.any()):
        return None
    return _joined(goes_on, take_rows(state, documents.row[group]), repeat_rows(backbone.init_state(1), len(group)))


def _joined(mask: Bool[Tensor, " N"], a: BackboneState, b: BackboneState) -> BackboneState:
    """Rows of a where the mask is true, else of b; keys and values that grow are as long as the longer ones."""

    def pick(x: Tensor, y: Tensor) -> Tensor:
        x, y = _grown(x, y), _grown(y, x)
        return torch.where(mask.view(-1, *[1] * (x.dim() - 1)), x, y)

    return map_state(pick, a, b)


def _grown(x: Tensor, like: Tensor) -> Tensor:
    """x (N, T, …) with as many rows at its end as `like` has more."""
    if x.dim() < 2 or x.shape[1] >= like.shape[1]:
        return x
    return F.pad(x, [0, 0] * (x.dim() - 2) + [0, like.shape[1] - x.shape[1]])


def _pick(states: list[tuple[Tensor, BackboneState]], wanted: Int[Tensor, " B"]) -> BackboneState:
    """The states of some documents, out of those of all groups."""
    picked: BackboneState | None = None
    for group, state in states:
        matches = wanted[:, None] == group
        here = take_rows(state, matches.long().argmax(1))
        picked = here if picked is None else _joined(matches.any(1), here, picked)
    assert picked is not None, "a row has a document"
    return picked


def _put_back(
    diagnostics: Diagnostics, told: list[tuple[Tensor, tuple[Tensor, Tensor], Diagnostics]], x: Hidden
) -> None:
    """What the groups have told, in the places of the call's tokens."""
    lists: list[Callable[[Diagnostics], list[Tensor]]] = [lambda d: d.surprise_norms, lambda d: d.hidden_states]
    for of in lists:
        for parts in zip(*(of(found) for *_, found in told), strict=True):
            whole = parts[0].new_zeros(*x.shape[:2], *parts[0].shape[2:])
            for (mine, at, _), part in zip(told, parts, strict=True):
                whole = whole.index_put((mine,), part[at])
            of(diagnostics).append(whole)
