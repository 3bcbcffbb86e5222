"""The store at which the processes of a run meet."""

from datetime import timedelta

import torch.distributed as dist

_stores: list[dist.Store] = []
"""The rendezvous store, and one ``PrefixStore`` of it for each ``Distributed`` that was joined."""


def own_store(timeout: timedelta) -> dist.Store:
    """A part of the store for one :class:`Distributed`: a second one here must not find the keys of the first."""
    if not _stores:
        store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
        _stores.append(store)
    own = dist.PrefixStore(f"world-{len(_stores)}", _stores[0])
    _stores.append(own)
    return own
