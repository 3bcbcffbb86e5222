"""One optimizer step under any strategy: an engine, and the parts that it is put together from."""
