"""Value candidate branches before a target model verifies them; change no token.

Importing this package stays light (numpy only): retrieval workers and other frameworks use
`DraftTree` without paying for torch. The engine lives in `valuspec.engine`.
"""

from valuspec.errors import CorruptTreeError, InvalidTreeError, ThresholdError, ValuSpecError
from valuspec.tree import DraftTree

__all__ = [
    "CorruptTreeError",
    "DraftTree",
    "InvalidTreeError",
    "ThresholdError",
    "ValuSpecError",
]
