"""Which threshold set a deployment uses, and when a new one may replace it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from valuspec.errors import ThresholdError
from valuspec.thresholds import ThresholdSet

logger = logging.getLogger(__name__)


class ActiveThresholds:
    """The set in use. A set that is refused leaves the last good one in place.

    With a model's fingerprint, sets of other models are refused. Without one (a deployment that
    serves every model) any set is taken, and `for_model` decides call by call.
    """

    def __init__(self, model_fingerprint: str | None) -> None:
        self._model_fingerprint = model_fingerprint
        self._shipped = ThresholdSet.starting(model_fingerprint or "")
        self.current = self._shipped

    def for_model(self, model_fingerprint: str) -> ThresholdSet:
        """The set in use, or the shipped one where the set in use is another model's."""
        if self.current.model_fingerprint == model_fingerprint:
            return self.current
        if self._shipped.model_fingerprint != model_fingerprint:
            self._shipped = ThresholdSet.starting(model_fingerprint)
        return self._shipped

    def apply(self, user_config: Mapping[str, Any]) -> bool:
        """Take the set a Serve `user_config` names; return False, with a log line, if refused.

        threshold_file:    path of a set; null is the shipped starting set
        threshold_version: refuse the file unless it holds this version; null or "latest" is any
        """
        path = user_config.get("threshold_file")
        wanted = user_config.get("threshold_version") or "latest"
        try:
            candidate = ThresholdSet.load(path) if path else self._shipped
            if self._model_fingerprint is not None:
                candidate.validate(model_fingerprint=self._model_fingerprint)
            if wanted not in ("latest", candidate.version):
                raise ThresholdError(
                    f"threshold set {path or '(shipped)'} has version {candidate.version}, "
                    f"version {wanted} is asked for"
                )
        except ThresholdError as error:
            logger.error("thresholds refused, %s stays: %s", self.current.version, error)
            return False
        if candidate.version != self.current.version:
            logger.info("thresholds %s -> %s", self.current.version, candidate.version)
        self.current = candidate
        return True
