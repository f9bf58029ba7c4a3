"""Finished answers become draft trees: one at a time, or many at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from retrieval.codec import MAX_DEPTH, MAX_NODES, BlobRejectedError, StoredTree, decode, encode
from retrieval.embedding import embed
from retrieval.namespace import tree_id
from retrieval.store import TreeStore
from valuspec.errors import InvalidTreeError
from valuspec.tree import DraftTree


def with_answer(kept: DraftTree | None, output_ids: Sequence[int], vocab_size: int) -> DraftTree:
    """The tree kept for a prompt, if any, with one more answer in it.

    Answers are kept up to the depth limit. Raises InvalidTreeError for an empty answer and for
    foreign token ids.
    """
    if len(output_ids) == 0:
        raise InvalidTreeError("an empty answer makes no tree")
    path = output_ids[:MAX_DEPTH]
    answer = DraftTree.from_paths([path]).validate(
        vocab_size=vocab_size, max_nodes=MAX_NODES, max_depth=MAX_DEPTH
    )
    merged = kept.merge([path]) if kept is not None else answer
    # Answers that share little: start over with the newest.
    return merged if len(merged) <= MAX_NODES else answer


async def store_answers(
    store: TreeStore,
    namespace: str,
    answers: Iterable[tuple[Sequence[int], Sequence[int]]],
    *,
    vocab_size: int,
) -> int:
    """Merge (prompt ids, output ids) into the trees of their prompts; return how many trees.

    Two round trips for all of them, so give some hundred at a time. Services that use the store
    index what is new within seconds. Raises StoreError, and ValueError or InvalidTreeError for an
    empty prompt or answer, before anything is written.
    """
    prompts: dict[int, Sequence[int]] = {}
    outputs: dict[int, list[Sequence[int]]] = {}
    for prompt_ids, output_ids in answers:
        id_ = tree_id(prompt_ids)
        prompts[id_] = prompt_ids
        outputs.setdefault(id_, []).append(output_ids)
    blobs: dict[int, bytes] = {}
    for id_, blob in zip(prompts, await store.fetch(namespace, list(prompts)), strict=True):
        tree = _kept(blob, namespace, id_, vocab_size)
        for output_ids in outputs[id_]:
            tree = with_answer(tree, output_ids, vocab_size)
        if tree is not None:
            stored = StoredTree(tree, embed(prompts[id_]))
            blobs[id_] = encode(stored, namespace=namespace, tree_id=id_)
    await store.put_many(namespace, blobs)
    return len(blobs)


def _kept(blob: bytes | None, namespace: str, id_: int, vocab_size: int) -> DraftTree | None:
    """What is damaged is replaced."""
    if blob is None:
        return None
    try:
        return decode(blob, namespace=namespace, tree_id=id_, vocab_size=vocab_size).tree
    except BlobRejectedError:
        return None
