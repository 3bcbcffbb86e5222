"""Settings that do not combine, as one table that checks, documentation and tests are made from."""
