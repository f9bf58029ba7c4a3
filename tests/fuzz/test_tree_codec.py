"""The tree codec against mutated blobs: it refuses them or reads a valid tree, and never crashes.

`make fuzz` runs it all: every flip of one bit and every truncation of 100 blobs, and CASES mutated
inputs (10 million unless CASES says otherwise) in one process, with the figures at the end. The
usual run takes a small share. A mutated input has its digest put right in half of the cases: a
checksum must not be what keeps the structure checks from being reached.
"""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections import Counter

import numpy as np
import pytest

from retrieval.codec import BlobRejectedError, StoredTree, decode, encode
from valuspec.tree import DraftTree

NAMESPACE, TREE_ID, VOCAB = "fuzz", 7, 1000
HEADER_BYTES, DIGEST_BYTES = 28, 16
#: Values that arithmetic goes wrong at.
EDGES = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1)


def read(blob: bytes) -> StoredTree:
    return decode(blob, namespace=NAMESPACE, tree_id=TREE_ID, vocab_size=VOCAB)


def blobs(count: int, seed: int = 0) -> list[bytes]:
    """Trees of all sizes from none to a few dozen nodes, with and without an embedding."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(count):
        paths = [rng.integers(0, VOCAB, rng.integers(1, 9)).tolist() for _ in range(number % 7)]
        embedding = rng.standard_normal(int(rng.choice([0, 3, 8]))).astype(np.float32)
        stored = StoredTree(DraftTree.from_paths(paths), embedding)
        made.append(encode(stored, namespace=NAMESPACE, tree_id=TREE_ID))
    return made


def mutated(blob: bytes, rng: random.Random) -> bytes:
    """One to four changes: bits, bytes, edge values, pieces cut out, doubled or moved."""
    data = bytearray(blob)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data)) if data else 0
        match rng.randrange(7):
            case 0 if data:
                data[at] ^= 1 << rng.randrange(8)
            case 1 if data:
                data[at] = rng.randrange(256)
            case 2:
                width = rng.choice((1, 2, 4))
                data[at : at + width] = (rng.choice(EDGES) & (256**width - 1)).to_bytes(
                    width, "little"
                )
            case 3:
                del data[at : at + rng.randint(1, 16)]
            case 4:
                data[at:at] = data[at : at + rng.randint(1, 32)]
            case 5:
                data[at:at] = rng.randbytes(rng.randint(1, 16))
            case 6 if len(data) > HEADER_BYTES:  # a field of the header
                data[rng.randrange(HEADER_BYTES)] = rng.randrange(256)
    if rng.random() < 0.7:  # else nearly all would be refused for their length
        data = data[: len(blob)].ljust(len(blob), b"\0")
    if rng.random() < 0.5 and len(data) > DIGEST_BYTES:
        body = bytes(data[:-DIGEST_BYTES])
        return body + hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest()
    return bytes(data)


def judge(blob: bytes) -> str:
    """What became of an input. Any exception but a refusal is a crash and comes out of here."""
    try:
        stored = read(blob)
    except BlobRejectedError as error:
        return error.reason
    # Whatever was accepted is a tree that can be used and stored again as it is.
    assert encode(stored, namespace=NAMESPACE, tree_id=TREE_ID) == blob
    return "accepted"


def fuzz(cases: int, seed: int) -> Counter[str]:
    rng = random.Random(seed)
    corpus = blobs(100)
    return Counter(judge(mutated(rng.choice(corpus), rng)) for _ in range(cases))


def test_mutated_blobs_are_refused_or_valid() -> None:
    outcomes = fuzz(4000, seed=1)
    assert set(outcomes) >= {"length", "magic", "version", "checksum", "foreign", "structure"}
    assert 0 < outcomes["accepted"] < 4000 / 4


@pytest.mark.slow
def test_every_flip_and_every_truncation_of_100_blobs() -> None:
    flips = cuts = 0
    for blob in blobs(100):
        for bit in range(8 * len(blob)):
            damaged = bytearray(blob)
            damaged[bit // 8] ^= 1 << bit % 8
            assert judge(bytes(damaged)) != "accepted"
            flips += 1
        for length in range(len(blob)):
            assert judge(blob[:length]) == "length"
            cuts += 1
    print(f"\n{flips} flipped bits and {cuts} truncations of 100 blobs, all refused")


@pytest.mark.slow
def test_ten_million_mutated_inputs() -> None:
    cases = int(float(os.environ.get("CASES", "1e7")))
    seed = int(os.environ.get("SEED", "0"))
    started = time.monotonic()
    outcomes = fuzz(cases, seed)
    assert outcomes.total() == cases
    seconds = time.monotonic() - started
    print(f"\n{cases} mutated inputs, seed {seed}, in {seconds:.0f} s: no crash; {dict(outcomes)}")
