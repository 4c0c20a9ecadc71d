"""The types of exit heads, each one entry: what config, training and serving ask of a type stands here.

A type's tensors are in `shapes.py`. Its module for training is in `vllm_eesd/distill/model.py`, that for serving in
`vllm_eesd/host/model/exit_head.py`; both name the entry.
"""

from __future__ import annotations

from typing import NamedTuple

from vllm_eesd.config import MAX_HEAD_LAYERS


class HeadType(NamedTuple):
    """A type of exit head.

    Attributes:
        name: `head_type` in a head's config.json.
        has_kv: whether it has tensors: decoder layers, each with KV of its own, and a norm. Without any, the target's
            final norm drafts.
        reads_target_output: whether the KV of verified tokens is made of the target's last hidden state (and h_N, and
            auxiliary layers), so that the head must know where a draft begins.
        first_exit_layer: the least N; 0 drafts from the embedding.
        max_layers: the most decoder layers.
    """

    name: str
    has_kv: bool = True
    reads_target_output: bool = False
    first_exit_layer: int = 1
    max_layers: int = 1

    def last_exit_layer(self, num_hidden_layers: int) -> int:
        """Return the largest N for a target of so many layers; without tensors it may be the whole target."""
        return num_hidden_layers - self.has_kv


HEADLESS = HeadType("headless", has_kv=False)
TRANSFORMER = HeadType("transformer")
DEEP_CONTEXT = HeadType("deep_context", reads_target_output=True, first_exit_layer=0, max_layers=MAX_HEAD_LAYERS)

HEAD_TYPES: dict[str, HeadType] = {head_type.name: head_type for head_type in (HEADLESS, TRANSFORMER, DEEP_CONTEXT)}
#: Those that `eesd distill` trains.
TRAINED = {name: head_type for name, head_type in HEAD_TYPES.items() if head_type.has_kv}
