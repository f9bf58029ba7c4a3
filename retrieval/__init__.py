"""Where draft trees live: similar earlier requests (FAISS) and what was answered then (Redis)."""

from retrieval.namespace import namespace
from retrieval.service import Outcome, RetrievalService, Retrieved, WriteOutcome

__all__ = ["Outcome", "RetrievalService", "Retrieved", "WriteOutcome", "namespace"]
