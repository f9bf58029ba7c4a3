"""Measuring. Each program prints a table and ends with one line of JSON."""

import valuspec.engine  # noqa: F401  (before torch: it sets how long torch's threads spin)
