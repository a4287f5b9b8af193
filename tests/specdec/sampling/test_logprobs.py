"""Log-probabilities: their values, their order, and their way through one tensor of integers."""

import pytest
import torch

from specdec.sampling.logprobs import ROWS, Unpacked, logprobs_of, num_packed, top_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top", [0, 1, 8])
def test_values_and_the_likeliest(top: int, dtype: torch.dtype) -> None:
    """Also of more rows than are in work at once,
    and of tokens that are not among the likeliest.
    """
    logits = (4 * torch.randn(ROWS + 3, 2, 300, generator=torch.Generator().manual_seed(0))).to(
        dtype
    )
    tokens = torch.randint(300, logits.shape[:2], generator=torch.Generator().manual_seed(1))
    tokens[0] = logits[0].argmax(-1)
    found, exact = logprobs_of(logits, tokens, top), logits.double().log_softmax(-1)
    bound = 4 * torch.finfo(torch.float32).eps * exact.abs().max()
    assert (found.values - exact.gather(-1, tokens[..., None])[..., 0]).abs().max() <= bound
    assert found.top_ids.shape == (*tokens.shape, top)
    assert (found.top_values - exact.topk(top).values).abs().amax().item() <= bound if top else True
    assert torch.equal(logits.gather(-1, found.top_ids), logits.topk(top).values)
    if top:
        assert torch.equal(found.values[0], found.top_values[0, :, 0]), (
            "of one token both are the same number"
        )


def test_equal_logits_come_in_the_order_of_their_tokens() -> None:
    logits = torch.zeros(1, 200)
    logits[0, [150, 20, 90]] = 1.0
    assert logprobs_of(logits, torch.tensor([5]), 5).top_ids.tolist() == [[20, 90, 150, 0, 1]]


def test_more_than_the_vocabulary_has() -> None:
    """The columns of a table are a power of two; a request may not ask for more tokens than there
    are.
    """
    found = logprobs_of(torch.tensor([[0.0, 2.0, 1.0]]), torch.tensor([2]), 4)
    assert found.top_ids[:, :3].tolist() == [[1, 2, 0]] and found.top_ids.shape == (1, 4)


def test_one_tensor_carries_all() -> None:
    found = logprobs_of(torch.randn(3, 2, 50), torch.randint(50, (3, 2)), 4)
    table = torch.cat([torch.full((3, 1), 7), found.packed()], dim=1)[:, 1:]
    for count, (value, ids, values) in enumerate(Unpacked(table, num_packed(4))):
        place = divmod(count, 2)
        assert value == found.values[place].item()
        assert ids == found.top_ids[place].tolist() and values == found.top_values[place].tolist()
    assert count == 5
    assert Unpacked(found.packed(), num_packed(4))[0][1] == found.top_ids[0, 0].tolist()


def test_the_token_itself_is_always_there() -> None:
    assert top_of(8, -1.0, [7, 8], [-0.5, -1.0], 2) == {7: -0.5, 8: -1.0}
    assert list(top_of(8, -1.0, [7, 8], [-0.5, -1.0], 1).items()) == [(7, -0.5), (8, -1.0)]
    assert top_of(8, -1.0, [7, 8], [-0.5, -1.0], 0) == {8: -1.0}
