"""Requests that lose their KV while they have drafts: what comes back is sampled right, and teaches no wrong cost."""

import json
import shutil

import numpy as np
import pytest
import torch

from vllm_eesd.host.v1 import verification
from vllm_eesd.policy import CostModel

K, NUM_PROMPTS, TOP_P, TEMPERATURE = 3, 300, 0.8, 1.2
BLOCK, LONGEST = 32, 160
#: Too few blocks for eight texts of up to five each: a request that needs one more has the newest one preempted.
TIGHT = {"num_gpu_blocks_override": 20, "block_size": BLOCK, "max_num_seqs": 8, "max_model_len": LONGEST}


@pytest.fixture(scope="module")
def target(eight_token_target, tmp_path_factory):
    """Directory of the target of eight tokens, for longer texts."""
    directory = shutil.copytree(eight_token_target, tmp_path_factory.mktemp("targets") / "longer")
    config = json.loads((directory / "config.json").read_text()) | {"max_position_embeddings": LONGEST}
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def nucleus(logits):
    """Return what top-p leaves of the distributions, [num_tokens, vocab_size] float64."""
    probabilities = (logits.double() / TEMPERATURE).softmax(-1)
    descending, order = probabilities.sort(dim=-1, descending=True)
    descending[descending.cumsum(-1) - descending >= TOP_P] = 0
    return torch.zeros_like(probabilities).scatter(-1, order, descending / descending.sum(-1, keepdim=True))


@pytest.mark.feature("sampling, preempted requests that come back with one token", "the same distribution")
def test_preempted_requests_that_sample(engine, target, cloned_head, preemptions, monkeypatch):
    """One whose last token alone is not cached is padded by drafts that nobody drew, and had drawn ones before."""
    from transformers import LlamaForCausalLM
    from vllm import SamplingParams

    padded, costs, sample, observe = [], [], verification.sample, CostModel.observe_verify

    def counting(runner, host_sample, logits, metadata, *args):
        padded.append(int((metadata.draft_token_ids < 0).sum()))
        return sample(runner, host_sample, logits, metadata, *args)

    def observing(self, num_reqs, num_tokens, ms):
        costs.append((num_reqs, num_tokens))
        return observe(self, num_reqs, num_tokens, ms)

    monkeypatch.setattr(verification, "sample", counting)
    monkeypatch.setattr(CostModel, "observe_verify", observing)
    generator = np.random.default_rng(0)
    # The newest requests have a token or a few: with such prompts, one more than what whole blocks hold.
    lengths = generator.choice([BLOCK - 1, BLOCK, 2 * BLOCK - 1, 2 * BLOCK], NUM_PROMPTS)
    prompts = [generator.integers(0, 8, length).tolist() for length in lengths]
    params = SamplingParams(temperature=TEMPERATURE, top_p=TOP_P, max_tokens=50, ignore_eos=True, detokenize=False)
    head = cloned_head(target, 1, 1)
    spec = {"method": "eesd", "model": head, "num_speculative_tokens": K, "policy": "beta_ts"}
    torch.manual_seed(0)
    with engine(target, spec, **TIGHT) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        (stats,) = llm.collective_rpc("eesd_stats")
    assert len(preemptions) > 30 and sum(padded) > 0  # it happened: no prompt fills a block that others could share
    assert 300 < stats["accepted"] < stats["drafted"] - 300
    assert all(num_tokens <= num_reqs * (1 + K) for num_reqs, num_tokens in costs)  # of steps that decode only
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    deviation, variance = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    with torch.inference_mode():
        for prompt, output in zip(prompts, outputs, strict=True):
            tokens = list(output.outputs[0].token_ids)
            p = nucleus(model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1])
            for number, value in enumerate((p == p.amax(-1, keepdim=True), p.clamp(min=1e-9).log())):
                value, mean = value.double(), (p * value.double()).sum(-1, keepdim=True)
                deviation[number] += (value - mean).gather(1, torch.tensor(tokens)[:, None]).sum()
                variance[number] += (p * (value - mean) ** 2).sum()
    # How often the likeliest token was emitted, and how likely tokens were: martingales, five standard deviations. A
    # token outside the nucleus counts log(1e-9) and is seen at once.
    assert (deviation.abs() < 5 * variance.sqrt()).all(), (deviation, variance)
