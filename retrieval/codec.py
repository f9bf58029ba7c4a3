"""A stored draft tree as bytes.

Little-endian, no padding:

    magic         4s  b"VSDT"
    version       u8
    flags         u8  must be 0
    embedding_dim u16
    num_nodes     u32
    namespace     8s  blake2b of the namespace
    tree_id       i64 the key it is stored under
    tokens, parents, counts   i32 [num_nodes] each
    embedding     f16 [embedding_dim]
    digest        16s blake2b of everything before it

The request's embedding travels with the tree: both expire together, and the index can be rebuilt
from the store alone. Namespace and tree id are repeated inside, so a value found under the wrong
key, or a reply meant for another call, is refused.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from valuspec.errors import CorruptTreeError, InvalidTreeError
from valuspec.tree import DraftTree

FORMAT_VERSION = 1
MAX_NODES = 8192
MAX_DEPTH = 4096
MAX_EMBEDDING_DIM = 4096

_MAGIC = b"VSDT"
_HEADER = struct.Struct("<4sBBHI8sq")
_DIGEST_SIZE = 16
MAX_BLOB_BYTES = _HEADER.size + 3 * 4 * MAX_NODES + 2 * MAX_EMBEDDING_DIM + _DIGEST_SIZE

RejectReason = Literal["length", "magic", "version", "checksum", "foreign", "structure"]


class BlobRejectedError(CorruptTreeError):
    """A stored blob is refused; `reason` is one of RejectReason, for counters."""

    def __init__(self, reason: RejectReason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason: RejectReason = reason


@dataclass(frozen=True, slots=True)
class StoredTree:
    """A draft tree and the embedding of the request it answered.

    embedding: float32 [embedding_dim], kept in half precision when stored
    """

    tree: DraftTree
    embedding: NDArray[np.float32]


def encode(stored: StoredTree, *, namespace: str, tree_id: int) -> bytes:
    """Return the blob. Raises InvalidTreeError if the tree exceeds what decode accepts."""
    tree, embedding = stored.tree, stored.embedding
    if len(embedding) > MAX_EMBEDDING_DIM:
        raise InvalidTreeError(
            f"embedding of {len(embedding)} numbers, at most {MAX_EMBEDDING_DIM} allowed"
        )
    tree.validate(vocab_size=2**31, max_nodes=MAX_NODES, max_depth=MAX_DEPTH)
    header = _HEADER.pack(
        _MAGIC, FORMAT_VERSION, 0, len(embedding), len(tree), _fingerprint(namespace), tree_id
    )
    arrays = (
        tree.tokens.astype("<i4"),
        tree.parents.astype("<i4"),
        tree.counts.astype("<i4"),
        embedding.astype("<f2"),
    )
    body = header + b"".join(array.tobytes() for array in arrays)
    return body + _digest(body)


def decode(blob: bytes, *, namespace: str, tree_id: int, vocab_size: int) -> StoredTree:
    """Return what `encode` stored under this namespace and id, or raise BlobRejectedError.

    Nothing is allocated before the length is known to fit the header and the caps.
    """
    if not _HEADER.size + _DIGEST_SIZE <= len(blob) <= MAX_BLOB_BYTES:
        raise BlobRejectedError(
            "length",
            f"{len(blob)} bytes, expected {_HEADER.size + _DIGEST_SIZE}..{MAX_BLOB_BYTES}",
        )
    magic, version, flags, dim, num_nodes, fingerprint, stored_id = _HEADER.unpack_from(blob)
    if magic != _MAGIC:
        raise BlobRejectedError("magic", f"starts with {magic!r}, expected {_MAGIC!r}")
    if version != FORMAT_VERSION or flags:
        raise BlobRejectedError(
            "version", f"version {version}, flags {flags}; expected {FORMAT_VERSION}, 0"
        )
    length = _HEADER.size + 3 * 4 * num_nodes + 2 * dim + _DIGEST_SIZE
    if len(blob) != length:
        raise BlobRejectedError("length", f"{len(blob)} bytes, the header announces {length}")
    if _digest(blob[:-_DIGEST_SIZE]) != blob[-_DIGEST_SIZE:]:
        raise BlobRejectedError("checksum", "content does not match its digest")
    if fingerprint != _fingerprint(namespace) or stored_id != tree_id:
        raise BlobRejectedError("foreign", "stored for another namespace or request")
    arrays = np.frombuffer(blob, "<i4", 3 * num_nodes, _HEADER.size).astype(np.int32)
    tree = DraftTree(*arrays.reshape(3, num_nodes))
    halves = np.frombuffer(blob, "<f2", dim, _HEADER.size + arrays.nbytes)
    if not np.isfinite(halves).all():
        raise BlobRejectedError("structure", "the embedding has infinite or NaN entries")
    try:
        tree.validate(vocab_size=vocab_size, max_nodes=MAX_NODES, max_depth=MAX_DEPTH)
    except InvalidTreeError as error:
        raise BlobRejectedError("structure", str(error)) from error
    return StoredTree(tree, halves.astype(np.float32))


def _fingerprint(namespace: str) -> bytes:
    return hashlib.blake2b(namespace.encode(), digest_size=8).digest()


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_SIZE).digest()
