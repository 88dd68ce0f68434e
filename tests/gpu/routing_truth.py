"""Which experts a router must choose, in fp64 and by code of its own.

Where two experts are closer than fp32 tells them apart, either order will do, and the token is not
certain; where they are equal, only the lowest id.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from weave_moe import RoutingConfig

LARGEST = torch.finfo(torch.float32).max
ROUNDING = 2.0**-18
"""Relative error of a score: an exponential in fp32, of an argument that is rounded too."""


@dataclass(frozen=True)
class Choice:
    """Which experts tokens get: ids [T, k], and for which tokens that is certain [T].

    keys: [T, E], what experts are chosen by, -inf in dropped groups.  slack: [T, E], error of the
    keys in fp32.  scores: [T, E], what experts are weighed by.
    """

    ids: Tensor
    certain: Tensor
    keys: Tensor
    slack: Tensor
    scores: Tensor
    config: RoutingConfig

    def weights(self, ids: Tensor) -> Tensor:
        """The weights of chosen experts, fp64 [T, k]."""
        weights = self.scores.gather(1, ids)
        if self.config.scoring == "topk_softmax":
            weights = torch.softmax(weights, dim=1)
        elif self.config.renormalize:
            weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20)
        return weights * self.config.scaling_factor


@dataclass(frozen=True)
class _Keys:
    """What experts or groups are ordered by: key and its error [T, n]; the scores, biases and
    uncertainties of logits that it is made of [T, n, m]; keys that are equal whatever they are made
    of [T, n]."""

    key: Tensor
    error: Tensor
    score: Tensor
    bias: Tensor
    slack: Tensor
    special: Tensor

    def decided(self, order: Tensor, place: int, rest: int) -> Tensor:
        """Whether what is at a place of `order` [T, n] is before all from place `rest` on beyond
        doubt: [T]."""

        def at(value: Tensor, chosen: slice) -> Tensor:
            index = order[:, chosen]
            if value.dim() == 3:
                index = index.unsqueeze(-1).expand(-1, -1, value.size(-1))
            return value.gather(1, index)

        one, others = slice(place, place + 1), slice(rest, None)
        apart = at(self.key, one) - at(self.key, others)
        clear = apart > at(self.error, one) + at(self.error, others)
        same = (at(self.score, one) == at(self.score, others)).all(dim=-1)
        same &= (at(self.bias, one) == at(self.bias, others)).all(dim=-1)
        same &= (at(self.slack, one) + at(self.slack, others) == 0).all(dim=-1)
        same |= at(self.special, one) & at(self.special, others) & (apart == 0)
        return (clear | same).all(dim=1)


def choose(logits: Tensor, slack: Tensor, config: RoutingConfig, bias: Tensor | None) -> Choice:
    """The choice by logits [T, E] in fp64 that are known to within `slack` [T, E]."""
    raw = logits.double()
    dead = raw.isnan() | (raw == -torch.inf)
    finite = raw.masked_fill(dead, -LARGEST).clamp(max=LARGEST)
    if config.scoring == "topk_softmax":
        scores, error = finite, slack.clone()
    else:
        scores = {
            "softmax": lambda v: torch.softmax(v, dim=1),
            "sigmoid": torch.sigmoid,
            "sqrtsoftplus": F.softplus,
        }[config.scoring](finite)
        # Where fp32 is at its end, experts are equal that fp64 tells apart.
        scores = scores.masked_fill(scores < 1e-46, 0.0)
        faint = 1e-37 * ((scores > 0) & (scores < 1e-36))
        if config.scoring == "sqrtsoftplus":
            scores, faint = scores.sqrt(), 4 * faint.sqrt()
        error = scores * (2 * slack + ROUNDING) + faint
        if config.scoring == "sigmoid":
            scores = scores.masked_fill(finite > 20, 1.0)
            error = error.masked_fill(finite > 20, 0.0)
    keys, added = scores, torch.zeros_like(scores)
    if bias is not None:
        added = bias.double().expand_as(scores)
        keys = scores + added
        error = error + 2.0**-22 * (scores.abs() + added.abs())
    dead = dead | keys.isnan()
    # Least but one, least, and most: these are equal among themselves whatever they are made of.
    keys = keys.clamp(-LARGEST * (1 - 2.0**-20), 1e300).masked_fill(dead, -LARGEST)
    special = dead | (keys == 1e300) | (keys == -LARGEST * (1 - 2.0**-20))
    error = error.masked_fill(special, 0.0)

    every = _Keys(keys, error, scores[..., None], added[..., None], slack[..., None], special)
    certain = torch.ones(raw.size(0), dtype=torch.bool, device=raw.device)
    if config.num_groups > 1:
        shape = (raw.size(0), config.num_groups, raw.size(1) // config.num_groups)
        best = keys.view(shape).sort(dim=-1, descending=True, stable=True).indices
        best = best[..., : 2 if bias is not None else 1]
        parts = [v.view(shape).gather(-1, best) for v in (keys, error, scores, added, slack)]
        total = parts[0].sum(dim=-1)
        wide = parts[1].sum(dim=-1) + (2.0**-22 * total.abs() if bias is not None else 0)
        infinite = total > LARGEST * (1 + 2.0**-25)
        total = total.masked_fill(infinite, 1e300)
        # How groups of dead experts rank among one another is nobody's contract.
        strange = special.view(shape).gather(-1, best).any(dim=-1) & ~infinite
        groups = _Keys(total, wide, parts[2], parts[3], parts[4], infinite)
        order = total.sort(dim=1, descending=True, stable=True).indices
        kept = config.topk_groups
        for place in range(kept if kept < config.num_groups else 0):
            certain &= groups.decided(order, place, kept)
            certain &= ~strange.gather(1, order[:, place : place + 1]).squeeze(1)
        dropped = torch.ones_like(total, dtype=torch.bool).scatter(1, order[:, :kept], False)
        keys = keys.view(shape).masked_fill(dropped.unsqueeze(-1), -torch.inf).view(keys.shape)
        every = replace(every, key=keys)
    order = keys.sort(dim=1, descending=True, stable=True).indices
    for place in range(config.top_k):
        certain &= every.decided(order, place, place + 1)
    return Choice(order[:, : config.top_k], certain, keys, error, scores, config)
