"""The engine, which makes one optimizer step under any strategy, and its parts."""
