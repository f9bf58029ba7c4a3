"""Put answers that were given elsewhere into the store of draft trees, a batch at a time.

What is read is what `jobs.transcripts` describes. A file is gone through once: after each batch,
how far it has come is written down, so an interrupted run goes on where it stopped, and a file
that has grown is read from where it had ended.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from jobs.transcripts import Tokenizer, UnusableLineError, parse_line
from retrieval.answers import store_answers
from retrieval.namespace import tree_id
from retrieval.store import TreeStore
from retrieval.tenants import Owner, TenantRegistry

BATCH = 256
MAX_NAMED = 20
"""Bad lines of which number and reason are kept; all are counted."""


@dataclass(slots=True)
class Ingested:
    """What has become of a file's lines.

    offset, line: where the next run begins, bytes and lines
    named:        (line, reason) of the first bad ones
    """

    offset: int = 0
    line: int = 0
    num_answers: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    named: list[tuple[int, str]] = field(default_factory=list)


class Progress:
    """How far a file has come, in a small file of its own in `folder`."""

    def __init__(self, folder: Path, source: Path, owner: Owner, corpus: str) -> None:
        key = json.dumps([str(source.resolve()), owner.namespace, corpus])
        self._path = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
        self._source = source

    def load(self) -> Ingested:
        """Where the last run ended; the beginning if there was none, or the file is another."""
        try:
            saved = json.loads(self._path.read_text())
            offset, line, digest = saved["offset"], saved["line"], saved["digest"]
        except (OSError, ValueError, KeyError, TypeError):
            return Ingested()
        if self._source.stat().st_size < offset or digest != self._digest(offset):
            return Ingested()
        return Ingested(offset=offset, line=line)

    def save(self, done: Ingested) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        saved = {"offset": done.offset, "line": done.line, "digest": self._digest(done.offset)}
        partial = self._path.with_suffix(f".{os.getpid()}.tmp")
        partial.write_text(json.dumps(saved))
        partial.replace(self._path)

    def forget(self) -> None:
        """Begin anew."""
        self._path.unlink(missing_ok=True)

    def _digest(self, offset: int) -> str:
        """Tells a file by its beginning and by what lies before `offset`."""
        with self._source.open("rb") as file:
            content = file.read(min(offset, 4096))
            file.seek(max(0, offset - 4096))
            content += file.read(min(offset, 4096))
        return hashlib.sha256(content).hexdigest()


async def ingest(
    source: Path,
    owner: Owner,
    corpus: str,
    *,
    trees: TreeStore,
    tenants: TenantRegistry,
    tokenizer: Tokenizer | None,
    progress: Progress,
    vocab_size: int = 2**31 - 1,
    report: Callable[[Ingested], None] = lambda _: None,
) -> Ingested:
    """Store the rest of a file as a corpus; `report` is called after each batch.

    A batch that was stored just before the run was killed is stored again by the next: the counts
    of its answers double, nothing else. Raises StoreError, OSError.
    """
    done = progress.load()
    await tenants.register(owner)
    batch: list[tuple[list[int], list[int]]] = []

    async def flush() -> None:
        if batch:
            await store_answers(trees, owner.namespace, batch, vocab_size=vocab_size)
            ids = {tree_id(prompt_ids) for prompt_ids, _ in batch}
            await tenants.add_to_corpus(owner.namespace, corpus, ids)
        done.num_answers += len(batch)
        batch.clear()
        progress.save(done)
        report(done)

    for line in _lines(source, done):
        try:
            _, answer = parse_line(line, tokenizer)
            if max(answer.output_ids.max(), answer.prompt_ids.max()) >= vocab_size:
                raise UnusableLineError("token ids beyond the vocabulary")
        except UnusableLineError as reason:
            done.skipped[str(reason)] += 1
            if len(done.named) < MAX_NAMED:
                done.named.append((done.line, str(reason)))
            continue
        batch.append((answer.prompt_ids.tolist(), answer.output_ids.tolist()))
        if len(batch) == BATCH:
            await flush()
    await flush()
    return done


def _lines(source: Path, done: Ingested) -> Iterator[bytes]:
    """The lines behind `done`, which counts each before it is given; a last line without its end
    counts as well."""
    with source.open("rb") as file:
        file.seek(done.offset)
        for line in file:
            done.offset += len(line)
            done.line += 1
            if line.strip():
                yield line
