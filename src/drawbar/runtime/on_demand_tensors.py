"""Tensors by name, each made by a function when it is asked for: read from any kind of file, or computed."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from drawbar.runtime.safetensors_reader import Slices, StoredTensors, further_names


@dataclass(frozen=True, eq=False)
class OnDemandTensor:
    """A tensor that is not in memory. Tied names share one such object."""

    shape: torch.Size
    dtype: torch.dtype
    get: Callable[[], Tensor]
    """Returns the tensor, in new memory or in memory that nobody changes; it may raise."""


class OnDemandTensors(StoredTensors):
    """A mapping of names to tensors, each made by an ``OnDemandTensor``. To read a region of one, all of it is made."""

    def __init__(self, tensors: Mapping[str, OnDemandTensor]) -> None:
        self._tensors = dict(tensors)

    @classmethod
    def of(cls, tensors: StoredTensors, get: Callable[[str], Tensor]) -> "OnDemandTensors":
        """The tensors of ``tensors``, each read by ``get``.

        Args:
            get: returns what ``tensors[name]`` does; it may raise other errors.
        """
        tied = tensors.tied()
        found = {
            name: OnDemandTensor(tensors.shape(name), tensors.dtype(name), partial(get, name))
            for name in tensors
            if name not in tied
        }
        return cls({name: found[tied.get(name, name)] for name in tensors})

    def shape(self, name: str) -> torch.Size:
        return self._tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def read(self, name: str, index: Slices) -> Tensor:
        return self._tensors[name].get()[index]

    def renamed(self, names: Mapping[str, str]) -> "OnDemandTensors":
        return OnDemandTensors({new: self._tensors[present] for new, present in names.items()})

    def tied(self) -> dict[str, str]:
        return further_names({name: id(tensor) for name, tensor in self._tensors.items()})

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors
