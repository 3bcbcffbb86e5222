"""The sections of a configuration: every setting, its type, its default and what it means."""
