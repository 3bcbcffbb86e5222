"""Parts of an output that a rank may hold are found in the whole, and nothing else is."""

import pytest
import torch

from drawbar.parity.divergence import pieces

WHOLE = torch.arange(2 * 12 * 24.0).reshape(2, 12, 24)


def is_found(part: torch.Tensor) -> bool:
    return any(torch.equal(part, piece) for piece in pieces(WHOLE, part.shape))


@pytest.mark.parametrize("rank", [0, 1])
def test_parts_of_a_rank(rank: int) -> None:
    assert is_found(WHOLE)
    assert is_found(WHOLE.chunk(2, 2)[rank])
    assert is_found(WHOLE.chunk(2, 1)[rank])
    assert is_found(WHOLE.chunk(2, 2)[rank].chunk(3, 1)[1])
    of_three = torch.cat([layer.chunk(2, 2)[rank] for layer in WHOLE.chunk(3, 2)], 2)
    assert is_found(of_three)
    ends = WHOLE.chunk(4, 1)
    assert is_found(torch.cat([ends[rank], ends[3 - rank]], 1))
    assert is_found(WHOLE.chunk(5, 2)[4 * rank])  # the last of parts of different sizes is smaller


def test_what_is_no_part() -> None:
    assert not is_found(WHOLE + 1)
    assert not is_found(WHOLE.chunk(2, 2)[0] * 2)
    assert not is_found(WHOLE[:, :, ::2])
    assert not is_found(WHOLE[0])
    assert not is_found(torch.zeros(2, 12, 25))
    assert not is_found(torch.zeros(2, 0, 24))
