"""Random numbers: Triton's, the reference's, and the range they must keep to."""

import torch
import triton
import triton.language as tl
from vllm_eesd.kernels.gpu import noise
from vllm_eesd.kernels.reference import noise as noise_reference

# One fp32 logarithm taken by two libraries, twice.
LOGARITHM_TOLERANCE = 4e-6


@triton.jit
def _draw(seed_ptr, position_ptr, key_ptr, uniform_ptr, gumbel_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    seed, position, key = tl.load(seed_ptr + i), tl.load(position_ptr + i), tl.load(key_ptr + i)
    tl.store(uniform_ptr + i, noise.uniform(seed, position))
    tl.store(gumbel_ptr + i, noise.gumbel(seed, position, key))


def test_the_reference_draws_what_triton_draws(device):
    g = torch.Generator().manual_seed(0)
    n = 4096
    seed = torch.randint(-(2**63), 2**63 - 1, (n,), generator=g)
    seed[:4] = torch.tensor([0, -1, 2**32, 2**63 - 1])
    position = torch.randint(0, 2**34, (n,), generator=g)
    key = torch.randint(0, 2**18, (n,), generator=g)
    uniform, gumbel = torch.empty(n, device=device), torch.empty(n, device=device)
    _draw[(1,)](seed.to(device), position.to(device), key.to(device), uniform, gumbel, BLOCK=n)
    assert torch.equal(uniform.cpu(), noise_reference.uniform(seed, position))
    expected = noise_reference.gumbel(seed, position, key)
    torch.testing.assert_close(gumbel.cpu(), expected, rtol=LOGARITHM_TOLERANCE, atol=LOGARITHM_TOLERANCE)


def test_uniforms_stay_inside_the_open_interval():
    position, key = torch.arange(200_000), torch.arange(200_000)
    for u in (
        noise_reference.uniform(torch.tensor(3), position),
        noise_reference.murmur3_uniform(torch.tensor(3), position, key),
    ):
        assert float(u.min()) > 0 and float(u.max()) <= 1
        assert abs(float(u.double().mean()) - 0.5) < 0.003
        assert abs(float(u.double().var()) - 1 / 12) < 0.001
