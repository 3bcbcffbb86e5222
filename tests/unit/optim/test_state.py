"""The state of optimizers on its way from a checkpoint."""

import weakref
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from drawbar.optim.state import load_optimizer_state


class Read(Mapping[str, Tensor]):
    """Tensors in files: each is new whenever it is asked for."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.on_host: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self.most_on_host = 0

    def __getitem__(self, name: str) -> Tensor:
        tensor = torch.tensor(3.0) if name.endswith("/step") else torch.ones(4)
        if tensor.dim():
            self.on_host.add(tensor)
        self.most_on_host = max(self.most_on_host, len(self.on_host))
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def test_each_tensor_goes_to_its_device_before_the_next_is_read() -> None:
    parameters = {nn.Parameter(torch.empty(4, device="meta")): f"layer.{number}" for number in range(9)}
    optimizer = torch.optim.AdamW(parameters)
    saved = Read([f"{name}/{key}" for name in parameters.values() for key in ("step", "exp_avg", "exp_avg_sq")])
    load_optimizer_state(parameters, [optimizer], saved)
    assert saved.most_on_host == 1
    for parameter in parameters:
        state = optimizer.state[parameter]
        assert state["exp_avg"].is_meta
        assert (state["step"].device.type, float(state["step"])) == ("cpu", 3.0)  # where AdamW wants it
