"""Settings that do not combine, as one table for checks, documentation and tests."""
