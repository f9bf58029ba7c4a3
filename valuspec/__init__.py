"""Value candidate branches before a target model verifies them; change no token.

Importing this package stays light (numpy only): retrieval workers and other frameworks use
`DraftTree` without paying for torch. The engine lives in `valuspec.engine`. The filter for other
people's trees, which compiles kernels, is imported when it is first named.
"""

from typing import TYPE_CHECKING, Any

from valuspec.errors import CorruptTreeError, InvalidTreeError, ThresholdError, ValuSpecError
from valuspec.tree import DraftTree

if TYPE_CHECKING:
    from valuspec.cost import CostStaircase
    from valuspec.filtering import Filtered, filter_tree, learn_thresholds
    from valuspec.thresholds import ThresholdSet

__all__ = [
    "CorruptTreeError",
    "CostStaircase",
    "DraftTree",
    "Filtered",
    "InvalidTreeError",
    "ThresholdError",
    "ThresholdSet",
    "ValuSpecError",
    "filter_tree",
    "learn_thresholds",
]

_LATER = {
    "CostStaircase": "valuspec.cost",
    "Filtered": "valuspec.filtering",
    "ThresholdSet": "valuspec.thresholds",
    "filter_tree": "valuspec.filtering",
    "learn_thresholds": "valuspec.filtering",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LATER[name]), name)
