"""Which tenants have anything stored, under which names, and the corpora they were given.

    vs:tenants                        set: [tenant, model fingerprint, tokenizer fingerprint]
    vs:corpora:<namespace>            set of names
    vs:corpus:<namespace>:<name>      set of the tree ids that came with a corpus

A namespace is a hash, so only this registry knows whose it is. A tenant's requests with a
cache_salt have namespaces of their own: their tenant is written `tenant#digest`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import astuple, dataclass

from retrieval.documents import Documents
from retrieval.forgetting import forget_trees
from retrieval.namespace import namespace
from retrieval.store import TreeStore

REGISTER_EVERY_S = 600.0
"""An entry is written anew so often: somebody may have dropped the tenant meanwhile."""
_BATCH = 1000


@dataclass(frozen=True, slots=True, order=True)
class Owner:
    """Whose trees, of which model."""

    tenant: str
    model_fingerprint: str
    tokenizer_fingerprint: str

    @property
    def namespace(self) -> str:
        return namespace(*astuple(self))

    def belongs_to(self, tenant: str) -> bool:
        """Whether it is the tenant's, salted requests included."""
        return self.tenant.partition("#")[0] == tenant


class TenantRegistry:
    """Use it from one event loop. Every method may raise StoreError."""

    def __init__(self, documents: Documents) -> None:
        self._documents = documents
        self._registered: dict[Owner, float] = {}

    async def register(self, owner: Owner) -> None:
        """Note that the owner has trees; asks the store now and then only."""
        now = time.monotonic()
        if now - self._registered.get(owner, -REGISTER_EVERY_S) >= REGISTER_EVERY_S:
            await self._documents.add_members("vs:tenants", json.dumps(astuple(owner)))
            self._registered[owner] = now

    async def owners(self, tenant: str | None = None) -> list[Owner]:
        """Every owner, or those of one tenant, in order. Entries of another form are left out."""
        found = []
        for member in await self._documents.members("vs:tenants"):
            match _parsed(member):
                case [str() as name, str() as model, str() as tokenizer]:
                    found.append(Owner(name, model, tokenizer))
        return sorted(o for o in found if tenant is None or o.belongs_to(tenant))

    async def drop(self, trees: TreeStore, owner: Owner) -> int:
        """Delete all that is stored of an owner, then its entry; return how many trees."""
        num_trees = await forget_trees(trees, owner.namespace)
        for corpus in await self.corpora(owner.namespace):
            await self._documents.delete(_corpus_key(owner.namespace, corpus))
        await self._documents.delete(_corpora_key(owner.namespace))
        await self._documents.remove_members("vs:tenants", json.dumps(astuple(owner)))
        self._registered.pop(owner, None)
        return num_trees

    async def corpora(self, namespace: str) -> list[str]:
        return sorted(await self._documents.members(_corpora_key(namespace)))

    async def add_to_corpus(self, namespace: str, corpus: str, tree_ids: Iterable[int]) -> None:
        await self._documents.add_members(_corpora_key(namespace), corpus)
        await self._documents.add_members(_corpus_key(namespace, corpus), *map(str, tree_ids))

    async def drop_corpus(self, trees: TreeStore, namespace: str, corpus: str) -> int:
        """Delete the trees a corpus brought; return how many ids it had.

        Answers that were given to the same prompts since lie in the same trees, and go with them.
        """
        ids = [int(id_) for id_ in await self._documents.members(_corpus_key(namespace, corpus))]
        for start in range(0, len(ids), _BATCH):
            await trees.drop(namespace, ids[start : start + _BATCH])
        await self._documents.delete(_corpus_key(namespace, corpus))
        await self._documents.remove_members(_corpora_key(namespace), corpus)
        return len(ids)


def _parsed(member: str) -> object:
    try:
        return json.loads(member)
    except ValueError:
        return None


def _corpora_key(namespace: str) -> str:
    return f"vs:corpora:{namespace}"


def _corpus_key(namespace: str, corpus: str) -> str:
    return f"vs:corpus:{namespace}:{corpus}"
