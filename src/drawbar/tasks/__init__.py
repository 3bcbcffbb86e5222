"""What users subclass, and the built-in tasks."""
