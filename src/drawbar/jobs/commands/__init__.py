"""The commands, one file each; light to import."""
