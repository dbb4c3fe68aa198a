"""Several documents in one row: cut apart by what clients say of them, read side by side, and put back into place."""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from titans_lm.backbone import Backbone, BackboneState
from titans_lm.layers import Diagnostics
from titans_lm.ops.state import map_state, repeat_rows, select_rows, take_rows
from titans_lm.ops.validate import check_tensors

Hidden = Float[Tensor, "B T E"]
PACKING = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}
"""What clients may say of rows with several documents, besides position_ids."""


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


def _starts_by_position(
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


def _starts_by_index(seq_idx: Tensor, x: Hidden, valid: Bool[Tensor, "B T"] | None) -> Bool[Tensor, "B T"]:
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


def _starts_by_length(cu_seq_lens: Tensor, x: Hidden) -> Bool[Tensor, "B T"]:
    """Where documents start by their cumulative lengths, 0 first and the number of all tokens last, in a single row."""
    ends, (B, T) = cu_seq_lens.flatten().tolist(), x.shape[:2]
    listed = cu_seq_lens.dim() == 1 and ends[:1] == [0] and ends[-1] == T
    if B != 1 or not listed or any(a > b for a, b in pairwise(ends)):
        raise ValueError(
            f"got cu_seq_lens {ends[:8]} for hidden states of {B} rows and {T} tokens; expected one row and lengths "
            f"added up from 0 to {T}"
        )
    starts = torch.zeros(1, T, dtype=torch.bool, device=x.device)
    starts[0, [end for end in ends[:-1] if end < T]] = True
    return starts


def find_documents(
    x: Tensor, state: BackboneState | None, valid: Tensor | None, position_ids: Tensor | None, packing: dict[str, Any]
) -> Documents | None:
    """The documents of packed rows; None where every row is one that goes on."""
    if unknown := set(packing) - PACKING:
        raise ValueError(f"got unknown arguments {sorted(unknown)}; expected those of TitansModel.forward")
    ends, keys, index = (packing.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"))
    check_tensors(cu_seq_lens_q=ends, cu_seq_lens_k=keys, seq_idx=index)
    if keys is not None and (ends is None or not torch.equal(keys, ends)):
        raise ValueError(
            "got cu_seq_lens_k other than cu_seq_lens_q; expected both alike: a memory has no cross-attention"
        )
    if x.shape[1] == 0 or (position_ids is None and ends is None and index is None):
        return None
    rows = torch.zeros(x.shape[0], dtype=torch.bool, device=x.device)
    if ends is not None:
        if state is not None and bool((state.position > 0).any()):
            raise ValueError(
                "got cu_seq_lens_q beside a state that has read tokens; expected no state, or seq_idx, by which "
                "the first document goes on"
            )
        return Documents.of(_starts_by_length(ends, x), ~rows)
    if index is not None:
        return Documents.of(_starts_by_index(index, x, valid), rows)
    found = _starts_by_position(position_ids, x, valid, None if state is None else state.position)
    return None if found is None else Documents.of(*found)


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
    outputs, states, places = torch.zeros_like(x), [], []
    for group in documents.groups():
        among = torch.full_like(documents.lengths, -1).index_copy(0, group, torch.arange(len(group), device=x.device))
        here = among[documents.of_token]
        mine = here >= 0
        at = here[mine], documents.place[mine]
        size = len(group), int(documents.lengths[group].max())
        rows = x.new_zeros(*size, x.shape[-1]).index_put(at, x[mine])
        mask = torch.zeros(size, dtype=torch.bool, device=x.device).index_put(at, real[mine])
        start, goes_on = None, documents.continues[group]
        if state is not None and bool(goes_on.any()):
            anew = repeat_rows(backbone.init_state(1), len(group))
            start = _joined(goes_on, take_rows(state, documents.row[group]), anew)
        y, after = backbone(rows, start, mask, diagnostics)
        outputs = outputs.index_put((mine,), y[at])
        states.append((group, after))
        places.append((mine, at))

    def put_back(parts: list[Tensor]) -> Tensor:
        whole = parts[0].new_zeros(*x.shape[:2], *parts[0].shape[2:])
        for (mine, at), part in zip(places, parts, strict=True):
            whole = whole.index_put((mine,), part[at])
        return whole

    if diagnostics is not None:
        diagnostics.join(len(places), put_back)
    return outputs, _pick(states, documents.of_token[:, -1])


def _joined(mask: Bool[Tensor, " N"], a: BackboneState, b: BackboneState) -> BackboneState:
    """Rows of a where the mask is true, else of b; keys and values that grow are as long as the longer ones."""
    return select_rows(mask, map_state(_grown, a, b), map_state(_grown, b, a))


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
