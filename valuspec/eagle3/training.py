"""The loss of a draft head, unrolled as it will be used: training-time test (arXiv 2503.01840).

From every anchor, a position whose next token is known, the head runs several steps ahead. The
first step reads the target's feature; each later one reads the hidden state of the step before.
All steps of an anchor attend to the keys of real features up to the anchor, and to those of the
steps between: just what a chain of drafted tokens will see when it is accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from valuspec.eagle3.config import HeadConfig
from valuspec.eagle3.head import DraftHead


class Labelled(NamedTuple):
    """One answer of the target, its prompt before it.

    features: of the target, [num_tokens, 3 * hidden]
    tokens:   int64 [num_tokens]
    top_ids:  int64 [last rows, k], tokens the target held likeliest after each of the last rows;
              the first of them is the prompt's last
    top_p:    float [last rows, k], their probabilities
    """

    features: torch.Tensor
    tokens: torch.Tensor
    top_ids: torch.Tensor
    top_p: torch.Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences laid end to end; rows are their tokens.

    features:  [num_rows, 3 * hidden] of the target
    tokens:    int64 [num_rows]
    first:     int64 [num_sequences + 1], first row of each sequence, and the end
    anchors:   int64 [num_anchors], ascending; a row whose successor exists
    label_ids: int64 [num_rows, k], draft ids the target held likeliest after this row; -1 pads
    label_p:   float [num_rows, k], their probabilities within the draft vocabulary
    labelled:  bool [num_rows], whether the target's own choice is among them
    """

    features: torch.Tensor
    tokens: torch.Tensor
    first: torch.Tensor
    anchors: torch.Tensor
    label_ids: torch.Tensor
    label_p: torch.Tensor
    labelled: torch.Tensor

    @classmethod
    def of(cls, answers: Sequence[Labelled], t2d: torch.Tensor) -> Batch:
        """Lay answers end to end.

        t2d: int64 [vocabulary], draft id of each token; -1 where it has none
        """
        tokens = torch.cat([a.tokens for a in answers])
        first = torch.tensor([0, *(len(a.tokens) for a in answers)]).cumsum(0)
        width = answers[0].top_ids.shape[1]
        label_ids = torch.full((len(tokens), width), -1)
        label_p = torch.zeros(len(tokens), width)
        anchors = []
        for answer, end in zip(answers, first[1:].tolist(), strict=True):
            begin = end - len(answer.top_ids)
            ids = t2d[answer.top_ids]
            p = answer.top_p * (ids >= 0)
            label_ids[begin:end] = ids
            label_p[begin:end] = p / p.sum(-1, keepdim=True).clamp(min=1e-6)
            anchors.append(torch.arange(begin, end - 2))
        features = torch.cat([a.features for a in answers]).float()
        return cls(features, tokens, first, torch.cat(anchors), label_ids, label_p,
                   label_ids[:, 0] >= 0)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Unrolled:
    """Outcome of one batch.

    loss:  scalar; mean cross-entropy of each step, weighted by decay ** step
    ranks: int64 [num_anchors, num_steps], how many tokens the head held likelier than the target's
           choice; -1 where the sequence has ended, draft_vocab_size where the choice is not in it
    """

    loss: torch.Tensor
    ranks: torch.Tensor


def unroll(head: DraftHead, batch: Batch, num_steps: int, decay: float = 0.8) -> Unrolled:
    """Run `num_steps` from every anchor."""
    rows = torch.arange(len(batch.tokens))
    sequence = torch.bucketize(batch.anchors, batch.first[1:], right=True)
    ends = batch.first[1:][sequence]
    attention = _ChainAttention(batch, sequence)
    # The last token of a sequence has no successor; its row is never attended to.
    following = batch.tokens[(rows + 1).clamp(max=len(rows) - 1)]
    positions = rows - batch.first[torch.bucketize(rows, batch.first[1:], right=True)]
    context = head.project(following, head.fuse(batch.features), positions)
    attention.set_context(context.key, context.value)
    residual, query = context.residual[batch.anchors], context.query[batch.anchors]
    loss = batch.features.new_zeros((), dtype=torch.float32)
    ranks = []
    for step in range(num_steps):
        labels = batch.anchors + 1 + step
        alive = labels < ends - 1  # the last token's row predicts nothing that was said
        labels = labels.clamp(max=len(rows) - 1)
        hidden = head.finish(residual, attention.attend(query).flatten(1))
        logits, hidden = head.logits(hidden)
        known = alive & batch.labelled[labels]
        log_p = logits.float().log_softmax(-1)
        ids, p = batch.label_ids[labels], batch.label_p[labels]
        likelihood = (log_p.gather(1, ids.clamp(min=0)) * p).sum(-1)
        loss = loss - decay**step * likelihood[known].sum() / max(1, int(known.sum()))
        ranks.append(_ranks(log_p.detach(), ids[:, 0], alive, known))
        if step + 1 < num_steps:
            chained = head.project(following[labels], hidden, positions[labels])
            attention.add_step(chained.key, chained.value)
            residual, query = chained.residual, chained.query
    return Unrolled(loss, torch.stack(ranks, dim=1))


def _ranks(
    log_p: torch.Tensor, choice: torch.Tensor, alive: torch.Tensor, known: torch.Tensor
) -> torch.Tensor:
    own = log_p.gather(1, choice.clamp(min=0)[:, None])
    ranks = (log_p > own).sum(-1)
    ranks[~known] = log_p.shape[-1]
    ranks[~alive] = -1
    return ranks


class _ChainAttention:
    """Attention of chains: to the context up to the anchor, and to the chain's own steps."""

    def __init__(self, batch: Batch, sequence: torch.Tensor) -> None:
        lengths = batch.first.diff()
        counts = torch.bincount(sequence, minlength=len(lengths))
        order = torch.arange(len(sequence)) - (counts.cumsum(0) - counts)[sequence]
        self._rows = _padded_places(batch.first[:-1], lengths)
        self._widest = int(counts.max())
        self._shape = (len(lengths), self._widest)
        self._places = sequence * self._widest + order
        local = batch.anchors - batch.first[sequence]
        upto = torch.full((len(lengths) * self._widest,), int(lengths.max()))
        upto[self._places] = local
        columns = torch.arange(self._rows.shape[1])
        # [sequences, anchors, context]
        self._hidden = columns > upto.view(*self._shape, 1)
        self._steps: list[tuple[torch.Tensor, torch.Tensor]] = []

    def set_context(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keys and values [num_rows, kv heads, size] of real features."""
        self._key = key[self._rows].permute(0, 2, 3, 1)  # [sequences, kv heads, size, context]
        self._value = value[self._rows].permute(0, 2, 1, 3)

    def add_step(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keys and values [num_anchors, kv heads, size] of the chains' next step."""
        self._steps.append((key, value))

    def attend(self, query: torch.Tensor) -> torch.Tensor:
        """[num_anchors, heads, size] for queries of the same shape."""
        sequences, kv_heads, size, _ = self._key.shape
        groups = query.shape[1] // kv_heads
        padded = query.new_zeros(sequences * self._widest, *query.shape[1:])
        padded = padded.index_copy(0, self._places, query)
        padded = padded.view(sequences, self._widest, kv_heads, groups, size).transpose(1, 2)
        scores = (padded.flatten(2, 3) @ self._key).float()
        scores = scores.view(sequences, kv_heads, self._widest, groups, -1)
        scores = scores.masked_fill(self._hidden[:, None, :, None], -torch.inf)
        context = scores.transpose(1, 2).flatten(0, 1)[self._places]  # [anchors, kv, groups, n]
        grouped = query.view(-1, kv_heads, groups, size)
        own = [(grouped * key[:, :, None]).sum(-1, keepdim=True).float() for key, _ in self._steps]
        weights = torch.cat([context, *own], dim=-1).softmax(-1).to(query.dtype)
        width = context.shape[-1]
        spread = weights.new_zeros(sequences * self._widest, kv_heads, groups, width)
        spread = spread.index_copy(0, self._places, weights[..., :width])
        spread = spread.view(sequences, self._widest, kv_heads, groups, width).transpose(1, 2)
        out = (spread.flatten(2, 3) @ self._value).view(sequences, kv_heads, self._widest, -1)
        attended = out.transpose(1, 2).flatten(0, 1)[self._places].view(grouped.shape)
        for index, (_, value) in enumerate(self._steps):
            attended = attended + weights[..., width + index, None] * value[:, :, None]
        return attended.flatten(1, 2)


def _padded_places(starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Rows of each sequence, int64 [sequences, longest]; shorter ones repeat their last row."""
    columns = torch.arange(int(lengths.max()))
    return starts[:, None] + torch.minimum(columns, (lengths - 1)[:, None])


def acceptance(ranks: torch.Tensor, width: int) -> list[float]:
    """Share of steps whose target token is among the head's `width` likeliest, by position.

    ranks: as in `Unrolled`. A position counts where all before it were accepted.
    """
    shares = []
    reached = torch.ones(len(ranks), dtype=torch.bool)
    for step in ranks.unbind(1):
        reached = reached & (step >= 0)
        hit = reached & (step < width)
        shares.append(float(hit.sum()) / max(1, int(reached.sum())))
        reached = hit
    return shares


def new_head(model: Any, vocabulary: torch.Tensor, layer_ids: tuple[int, ...]) -> DraftHead:
    """A head to train for a transformers model of the Llama family, in fp32.

    It begins with the model's own output layer for its vocabulary, int64 ascending, with the
    feed-forward layer of the last block, and with the highest feature passed through.
    """
    config = model.config
    hidden = config.hidden_size
    head = DraftHead(
        HeadConfig(
            hidden_size=hidden,
            target_hidden_size=hidden,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_size=getattr(config, "head_dim", None) or hidden // config.num_attention_heads,
            vocab_size=config.vocab_size,
            draft_vocab_size=len(vocabulary),
            layer_ids=layer_ids,
            rms_norm_eps=config.rms_norm_eps,
            rope={"rope_theta": config.rope_parameters["rope_theta"]},
        ),
        model.model.embed_tokens.weight,
    )
    last = model.model.layers[-1]
    with torch.no_grad():
        head.d2t.copy_(vocabulary - torch.arange(len(vocabulary)))
        head.lm_head.weight.copy_(model.lm_head.weight[vocabulary])
        head.norm.weight.copy_(model.model.norm.weight)
        head.fc.weight.mul_(0.1)
        head.fc.weight[:, -hidden:] += torch.eye(hidden)
        layer = head.midlayer
        layer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(layer.mlp, name).weight.copy_(getattr(last.mlp, name).weight)
    head.lm_head.requires_grad_(False)  # the target's own: little data cannot better it
    return head
