"""Measured against what people would pick instead, on the same machine, weights and prompts.

    python -m bench.peers --data DIR [--workloads ...] [--peers ...] [--limit N] [--out FILE.json]
    python -m bench.peers.page results.json docs/benchmarks.md

Every peer has a virtual environment of its own and runs as a process that reads requests and
writes replies, a JSON object a line (`workers/serve.py`).
"""
