"""Models, from the hub, a folder or scratch, and what is done to them: adapters, packed rows, loss heads, plans."""
