"""The engine, which runs one optimizer step under any strategy, and its parts."""
