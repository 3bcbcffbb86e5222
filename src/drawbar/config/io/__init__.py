"""Configurations in and out: read, merged, compared, explained; and what a user names in them."""
