"""Building models: from the hub, from a folder, or from scratch."""
