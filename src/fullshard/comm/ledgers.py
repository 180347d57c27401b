"""Which process group has which ledger."""

import weakref

import torch.distributed as dist

from fullshard.comm.ledger import Ledger


def known_ledger(group: dist.ProcessGroup) -> Ledger | None:
    """Return the ledger of a group if it has one already. Does not communicate."""
    return _ledgers.get(group)


def keep_ledger(group: dist.ProcessGroup, ledger: Ledger) -> Ledger:
    """Return the ledger of a group: this one, if it has none yet.

    So everything that a group does is entered in one, whichever way it communicates. Every rank of the
    group must call it at the same place of their sequence.
    """
    return _ledgers.setdefault(group, ledger)


_ledgers: "weakref.WeakKeyDictionary[dist.ProcessGroup, Ledger]"
_ledgers = weakref.WeakKeyDictionary()
