"""Drafts drawn by shared noise: the kernel, its reference, and scores written down say the same."""

import pytest
import torch
from vllm_eesd.kernels.gpu.shared_draw import DRAW_BLOCK, shared_draw
from vllm_eesd.kernels.reference import noise
from vllm_eesd.kernels.reference import shared_draw as reference

#: Scores are sums of numbers of a size of ten, each within a last place or two.
SCORE_TOLERANCE = 2e-5
#: By row: negative is no request.
IDX_MAPPING = torch.tensor([2, 0, -1, 5, 1, 4, 3])
SHARES = torch.tensor([True, False, True, True, False, True])
KEPT = torch.arange(100, 107), torch.linspace(0.1, 0.7, 7)


def make(vocab_size, padding=0, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(7, vocab_size + padding, generator=g) * 3).to(dtype)[:, :vocab_size]
    temperature = torch.tensor([0.7, 0.0, 1.0, 1.5, 0.0, 0.3])
    seeds, positions = torch.randint(-(2**63), 2**63 - 1, (6,), generator=g), torch.randint(0, 9000, (7,), generator=g)
    return logits, IDX_MAPPING, temperature, seeds, positions, SHARES, *KEPT


def draw(arguments, device):
    return [made.cpu() for made in shared_draw(*(tensor.to(device) for tensor in arguments))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 2, 7, DRAW_BLOCK, DRAW_BLOCK + 1, 3 * DRAW_BLOCK - 5])
def test_drafts_and_margins(device, vocab_size, dtype):
    arguments = make(vocab_size, padding=9, dtype=dtype)
    logits, _, temperature, seeds, positions, *_ = arguments
    tokens, confidences = draw(arguments, device)
    for found in (
        (tokens, confidences),
        reference.shared_draw(*arguments) if vocab_size > 1 else (tokens, confidences),
    ):
        for row, slot in enumerate(IDX_MAPPING.tolist()):
            if slot < 0 or not SHARES[slot]:
                assert (found[0][row], found[1][row]) == (KEPT[0][row], KEPT[1][row])
                continue
            scores = logits[row].float() / temperature[slot]
            scores += noise.gumbel(seeds[slot], positions[row], torch.arange(vocab_size))
            largest = scores.topk(min(2, vocab_size))
            assert found[0][row] == largest.indices[0]
            margin = largest.values[0] - largest.values[1] if vocab_size > 1 else torch.tensor(torch.inf)
            torch.testing.assert_close(found[1][row], 1 - torch.exp(-margin), atol=SCORE_TOLERANCE, rtol=0)


def test_nans_win_nothing_and_a_row_of_them_has_no_confidence(device):
    arguments = make(50)
    arguments[0][0, :49], arguments[0][3] = torch.nan, torch.nan
    for tokens, confidences in (draw(arguments, device), reference.shared_draw(*arguments)):
        assert tokens[0] == 49 and confidences[0] == 1
        assert 0 <= tokens[3] < 50 and torch.isnan(confidences[3])


def check(kernel, device):
    """Rows verified by the ratio of probabilities keep the confidence they have, whatever the noise is."""
    for seed in range(4):
        made = kernel(*(tensor.to(device) for tensor in make(300, seed=seed)))
        for row, slot in enumerate(IDX_MAPPING.tolist()):
            if slot < 0 or not SHARES[slot]:
                assert made[1][row].item() == KEPT[1][row].item() and made[0][row].item() == KEPT[0][row].item()


def test_no_margin_is_told_of_rows_that_do_not_share_their_noise(device):
    check(shared_draw, device)


def test_a_margin_told_of_every_row_is_noticed(device):
    def leaking(logits, idx_mapping, temperature, seeds, positions, shares_noise, *kept):
        return shared_draw(
            logits, idx_mapping, temperature + 0.5, seeds, positions, torch.ones_like(shares_noise), *kept
        )

    with pytest.raises(AssertionError):
        check(leaking, device)
