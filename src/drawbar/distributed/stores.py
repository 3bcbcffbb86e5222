"""The rendezvous store (c10d) of a run's processes."""

from datetime import timedelta

import torch.distributed as dist

from drawbar.errors import ExitCode, UserError

_stores: list[dist.Store] = []
"""The rendezvous store, and one ``PrefixStore`` of it for each ``Distributed`` that was joined."""


def prefixed_store(timeout: timedelta) -> dist.Store:
    """A ``PrefixStore`` for one :class:`Distributed`, so that a second one in this process does not find the keys of
    the first.

    Raises:
        UserError: this process has a process group already.
    """
    if dist.is_initialized():
        raise UserError(
            "this process has a process group already: that of a run that has failed here, or one of the script's own",
            where="torch.distributed",
            remedy="after a run that has failed, start the script anew; make no process group before a run",
            exit_code=ExitCode.FAILED,
        )
    if not _stores:
        store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
        _stores.append(store)
    own = dist.PrefixStore(f"world-{len(_stores)}", _stores[0])
    _stores.append(own)
    return own
