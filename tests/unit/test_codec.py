"""Blobs: what was stored comes back, and nothing else is accepted."""

import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from retrieval.codec import (
    MAX_BLOB_BYTES,
    MAX_DEPTH,
    MAX_NODES,
    BlobRejectedError,
    StoredTree,
    decode,
    encode,
)
from valuspec.errors import CorruptTreeError, InvalidTreeError
from valuspec.tree import DraftTree

NAMESPACE, TREE_ID, VOCAB = "0123456789abcdef", 42, 1000


def read(blob: bytes, namespace: str = NAMESPACE, tree_id: int = TREE_ID) -> StoredTree:
    return decode(blob, namespace=namespace, tree_id=tree_id, vocab_size=VOCAB)


def write(tree: DraftTree, embedding: np.ndarray | None = None) -> bytes:
    vector = np.zeros(0, np.float32) if embedding is None else embedding
    return encode(StoredTree(tree, vector), namespace=NAMESPACE, tree_id=TREE_ID)


def forge(tokens, parents, counts, *, embedding=(), num_nodes=None) -> bytes:
    """A blob with a valid digest, written from the documented layout alone."""
    body = struct.pack(
        "<4sBBHI8sq",
        b"VSDT",
        1,
        0,
        len(embedding),
        len(tokens) if num_nodes is None else num_nodes,
        hashlib.blake2b(NAMESPACE.encode(), digest_size=8).digest(),
        TREE_ID,
    )
    for array in (tokens, parents, counts):
        body += struct.pack(f"<{len(array)}i", *array)
    body += struct.pack(f"<{len(embedding)}e", *embedding)
    return body + hashlib.blake2b(body, digest_size=16).digest()


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    token = st.integers(0, VOCAB - 1)
    paths = draw(st.lists(st.lists(token, min_size=1, max_size=12), max_size=6))
    return DraftTree.from_paths(paths)


@given(trees(), hnp.arrays(np.float32, st.integers(0, 32), elements=st.floats(-1, 1, width=16)))
def test_what_is_stored_comes_back(tree: DraftTree, embedding: np.ndarray) -> None:
    stored = read(write(tree, embedding))
    for name in ("tokens", "parents", "counts"):
        got = getattr(stored.tree, name)
        assert got.dtype == np.int32
        assert got.tolist() == getattr(tree, name).tolist()
    assert stored.embedding.dtype == np.float32
    assert stored.embedding.tolist() == embedding.tolist()


def test_the_layout_is_the_documented_one() -> None:
    tree = DraftTree.from_paths([[5, 6], [5, 7], [8]])
    forged = forge(tree.tokens, tree.parents, tree.counts, embedding=[0.5, -0.25])
    assert write(tree, np.array([0.5, -0.25], np.float32)) == forged


BLOBS = [
    write(DraftTree.empty()),
    write(DraftTree.from_paths([[3]])),
    write(DraftTree.from_paths([range(20), [0, 1, 5, 6]]), np.linspace(-1, 1, 8, dtype=np.float32)),
]


@pytest.mark.parametrize("blob", BLOBS, ids=len)
@pytest.mark.fault(7)
def test_every_flipped_bit_is_noticed(blob: bytes) -> None:
    for bit in range(8 * len(blob)):
        damaged = bytearray(blob)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptTreeError):
            read(bytes(damaged))


@pytest.mark.parametrize("blob", BLOBS, ids=len)
@pytest.mark.fault(7)
def test_every_truncation_and_extension_is_noticed(blob: bytes) -> None:
    for length in range(len(blob)):
        with pytest.raises(BlobRejectedError) as caught:
            read(blob[:length])
        assert caught.value.reason == "length"
    with pytest.raises(CorruptTreeError):
        read(blob + b"\0")


@given(st.binary(max_size=400))
def test_random_bytes_are_refused(blob: bytes) -> None:
    with pytest.raises(CorruptTreeError):
        read(blob)


@pytest.mark.parametrize(
    ("tokens", "parents", "counts"),
    [
        ([VOCAB], [-1], [1]),
        ([-1], [-1], [1]),
        ([1, 2], [1, 0], [1, 1]),  # a cycle
        ([1], [0], [1]),  # its own parent
        ([1], [-2], [1]),
        ([1], [-1], [0]),
        ([1] * (MAX_DEPTH + 1), range(-1, MAX_DEPTH), [1] * (MAX_DEPTH + 1)),
    ],
    ids=["vocabulary", "negative", "cycle", "self", "parent", "count", "depth"],
)
@pytest.mark.fault(8)
def test_a_valid_digest_does_not_excuse_a_broken_tree(tokens, parents, counts) -> None:
    with pytest.raises(BlobRejectedError) as caught:
        read(forge(tokens, parents, counts))
    assert caught.value.reason == "structure"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.fault(8)
def test_embeddings_are_finite(bad: float) -> None:
    with pytest.raises(BlobRejectedError) as caught:
        read(forge([1], [-1], [1], embedding=[bad]))
    assert caught.value.reason == "structure"


@pytest.mark.fault(8, 9)
def test_an_announced_length_is_checked_before_it_is_believed() -> None:
    with pytest.raises(BlobRejectedError) as caught:
        read(forge([1], [-1], [1], num_nodes=2**32 - 1))
    assert caught.value.reason == "length"


@pytest.mark.fault(9)
def test_a_giant_value_is_refused_by_its_length() -> None:
    with pytest.raises(BlobRejectedError) as caught:
        read(bytes(MAX_BLOB_BYTES + 1))
    assert caught.value.reason == "length"


@pytest.mark.parametrize(
    ("where", "value", "reason"), [(0, b"X", "magic"), (4, b"\2", "version"), (5, b"\1", "version")]
)
@pytest.mark.fault(26)
def test_other_formats_are_named(where: int, value: bytes, reason: str) -> None:
    blob = BLOBS[1]
    with pytest.raises(BlobRejectedError) as caught:
        read(blob[:where] + value + blob[where + 1 :])
    assert caught.value.reason == reason


@pytest.mark.fault(10)
def test_a_blob_of_another_namespace_or_request_is_foreign() -> None:
    for namespace, tree_id in [("other", TREE_ID), (NAMESPACE, TREE_ID + 1)]:
        with pytest.raises(BlobRejectedError) as caught:
            read(BLOBS[1], namespace, tree_id)
        assert caught.value.reason == "foreign"


def test_the_largest_tree_fits_and_a_larger_one_is_not_written() -> None:
    widest = DraftTree.from_lists([1] * MAX_NODES, [-1] * MAX_NODES)
    assert len(read(write(widest)).tree) == MAX_NODES
    with pytest.raises(InvalidTreeError, match="8193 nodes"):
        write(DraftTree.from_lists([1] * (MAX_NODES + 1), [-1] * (MAX_NODES + 1)))
