"""Make a target of 134 million random weights, with an exit head that was never trained: a bad case at a real step.

    python -P models/make/make_random_target.py build/random_135m

What EESD adds to a step does not grow with the model, so against the embedded model's step of a few milliseconds it
looks large. This target takes tens of milliseconds a step, as models that people serve on a CPU do, and no greedy draft
of its head is worth its time. (Sampled it is no bad case: of distributions so flat most drawn drafts are accepted.) Its
tokenizer is the embedded model's.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch

EMBEDDED = Path(__file__).resolve().parents[2] / "models" / "eesd-code-10m"
#: Sizes of the small Llamas that are served on CPUs; the embedding is tied.
SIZES = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
#: The head drafts after so many layers, a twelfth of the target's as the embedded model's does.
EXIT_LAYER = 3


def write_target(directory: Path, sizes: dict[str, int | bool], seed: int = 0) -> None:
    """Write a random target to `directory` and a random `transformer` exit head to `eesd/` in it.

    Args:
        sizes: of transformers' `LlamaConfig`.
    Raises:
        ValueError: `directory` holds another model's head.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    from vllm_eesd.exit_head.checkpoint import ExitHeadConfig, Verifier, write_head
    from vllm_eesd.exit_head.shapes import expected_shapes

    torch.manual_seed(seed)
    config = LlamaConfig(**sizes)
    LlamaForCausalLM(config).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, directory / name)
    head = ExitHeadConfig(
        exit_layer=EXIT_LAYER,
        head_type="transformer",
        verifier=Verifier(
            name_or_path=directory.name,
            architecture="LlamaForCausalLM",
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_hidden_layers,
            vocab_size=config.vocab_size,
        ),
        transformer_layer_config=config.to_dict(),
    )
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * config.initializer_range
        for name, shape in expected_shapes(head).items()
    }
    write_head(directory / "eesd", head, tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    write_target(parser.parse_args().directory, SIZES)


if __name__ == "__main__":
    main()
