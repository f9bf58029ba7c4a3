"""Names of draft trees: who may share them, and which prompt they answer."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from retrieval.codec import FORMAT_VERSION
from retrieval.embedding import EMBEDDING_VERSION


def namespace(tenant: str, model_fingerprint: str, tokenizer_fingerprint: str) -> str:
    """Return 24 hex digits naming one tenant's trees of one model and tokenizer.

    Trees of another tokenizer are worse than none and trees of another tenant leak what was
    asked, so both are unreachable by construction. Blob layout and embedding versions take part
    too: after an upgrade, old and new processes can share one Redis without meeting.
    """
    digest = hashlib.blake2b(digest_size=12, person=b"vs-namespace")
    versions = f"{FORMAT_VERSION}.{EMBEDDING_VERSION}"
    for part in (tenant, model_fingerprint, tokenizer_fingerprint, versions):
        encoded = part.encode()
        # Length first: ("ab", "c") and ("a", "bc") must differ.
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()


def tree_id(prompt_ids: Sequence[int]) -> int:
    """Return the id of the tree kept for a prompt: 63 bits of a hash of its token ids.

    Derived, not allocated: every process knows it without asking, two replicas answering one
    prompt write one tree, and an id can never come to mean another prompt.
    """
    content = np.asarray(prompt_ids, "<i8").tobytes()
    digest = hashlib.blake2b(content, digest_size=8, person=b"vs-tree-id").digest()
    return int.from_bytes(digest, "little") >> 1
