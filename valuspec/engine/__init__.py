"""The engine: the target model behind a step that drafts, verifies and commits."""

import os

# libgomp's threads wait for work in a busy loop of a few milliseconds, on cores that the gateway or
# another replica needs. A tenth of that is enough between two matrix products. Read when torch is
# loaded, so this comes first.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")
