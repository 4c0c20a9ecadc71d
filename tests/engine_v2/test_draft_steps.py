"""The device's side without an engine: buffers, limits, graphs; and that nothing in it waits for the device."""

import contextlib
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

MAX_REQS, K, BLOCK_SIZE, MAX_MODEL_LEN = 4, 3, 4, 20
#: What reads a value on the host: `item`, `bool`, boolean indexing.
WAITING = ("_local_scalar_dense", "item", "nonzero", "masked_select", "unique")


class NoWaiting(TorchDispatchMode):
    """Fails on every operator that would make the host wait for the device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        waits = any(f"aten.{waiting}" in name for waiting in WAITING)
        if "aten.index.Tensor" in name:
            waits = any(index is not None and index.dtype == torch.bool for index in args[1])
        assert not waits, f"{name} waits for the device"
        return function(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def modules():
    if not torch.cuda.is_available():
        import vllm.v1.worker.cpu.shm  # noqa: F401  # as the worker: before anything of V2
    from vllm_eesd.host.v2 import draft_steps as v2_draft_steps
    from vllm_eesd.host.v2 import ragged as v2_ragged
    from vllm_eesd.host.v2 import verification as v2_verification

    return SimpleNamespace(steps=v2_draft_steps, ragged=v2_ragged, verification=v2_verification)


class Model:
    """Drafts the input token plus one, always equally sure; remembers what it was given."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, positions, context):
        self.seen.append((input_ids.clone(), positions.clone()))
        return input_ids.long() + 1, torch.full((len(input_ids),), 0.5), torch.zeros(len(input_ids), 8)


@pytest.fixture
def drafting(modules, monkeypatch):
    """DraftSteps of four request states, of which request 0 has 2 blocks and the others 5."""
    monkeypatch.setattr(modules.steps, "set_forward_context", lambda *args, **kwargs: contextlib.nullcontext())
    # In vLLM 0.33 the longest sequence is a property.
    given = {"load_draft_model": None, "propose": None, "max_model_len": MAX_MODEL_LEN}
    self = object.__new__(type("Concrete", (modules.steps.DraftSteps,), given))
    self.max_num_reqs, self.num_speculative_steps = MAX_REQS, K
    self.vllm_config, self.draft_logits, self._graphs = None, None, None
    self.supports_decode_metadata_update, self._kv_group = False, 0
    self.model = Model()
    self.idx_mapping = torch.zeros(MAX_REQS, dtype=torch.int64)
    self._inputs = self.input_buffers = modules.steps.DraftInputs(
        input_ids=torch.zeros(8, dtype=torch.int32),
        positions=torch.zeros(8, dtype=torch.int64),
        seq_lens=torch.full((MAX_REQS,), 99, dtype=torch.int32),
        query_start_loc=torch.zeros(MAX_REQS + 1, dtype=torch.int32),
        idx_mapping=self.idx_mapping,
        position_limit=torch.zeros(MAX_REQS, dtype=torch.int64),
        columns=torch.zeros(MAX_REQS, dtype=torch.int64),
        last_rows=torch.zeros(MAX_REQS, dtype=torch.int64),
    )
    self._no_blocks = torch.zeros(MAX_REQS, dtype=torch.int32)
    num_blocks = torch.tensor([[2, 5, 5, 5]], dtype=torch.int32)
    self.block_tables = SimpleNamespace(num_blocks=SimpleNamespace(gpu=num_blocks), block_sizes=[BLOCK_SIZE])
    self.draft_tokens = torch.zeros(MAX_REQS, K, dtype=torch.int64)
    self.draft_token_confidence_probs = torch.zeros(MAX_REQS, K)
    self._drafts = modules.steps.Drafts(self.draft_tokens, self.draft_token_confidence_probs)
    self._round_context = None
    return self


def prepare(drafting, idx_mapping, seq_lens, num_sampled, num_rejected):
    from vllm_eesd.host.v2.batch import TargetStep

    idx_mapping = torch.tensor(idx_mapping)
    drafting.idx_mapping.fill_(-1)
    drafting.idx_mapping[: len(idx_mapping)] = idx_mapping
    batch = SimpleNamespace(
        num_reqs=len(idx_mapping),
        idx_mapping=idx_mapping,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        query_start_loc=torch.arange(len(idx_mapping) + 1, dtype=torch.int32),
    )
    last_sampled = torch.tensor([[10], [20], [30], [40]])
    rejected = torch.tensor(num_rejected, dtype=torch.int32)
    sampled = torch.tensor(num_sampled, dtype=torch.int32)
    step = TargetStep(batch, torch.zeros(8, 2), sampled, rejected, last_sampled)
    with NoWaiting():
        drafting._prepare(step, None, None)


def test_a_round_starts_at_the_bonus_token_and_writes_only_its_own_blocks(drafting):
    # Requests 0, 2 and 1: at the end of its two blocks, in the middle, in a prompt chunk.
    prepare(drafting, [0, 2, 1], seq_lens=[7, 9, 4], num_sampled=[1, 2, 0], num_rejected=[0, 1, 0])
    buffers = drafting.input_buffers
    assert buffers.input_ids[:3].tolist() == [10, 30, 0]
    assert buffers.positions[:3].tolist() == [7, 8, 0]
    assert buffers.seq_lens.tolist() == [8, 9, 1, 0]
    assert drafting.idx_mapping.tolist() == [0, 2, -1, -1]
    with NoWaiting():
        drafting._draft(3, 3, None, None, None, None)
    assert drafting.idx_mapping.tolist() == [-1, 2, -1, -1]  # position 8 is in nobody's block of request 0
    with NoWaiting():
        drafting._draft(3, 3, None, None, None, None)
    assert drafting.draft_tokens[:2, :2].tolist() == [[11, 12], [31, 32]]
    assert drafting.model.seen[1][0][:2].tolist() == [11, 31]
    assert drafting.model.seen[1][1][:2].tolist() == [8, 9]


def test_nothing_is_written_past_the_longest_sequence(drafting):
    prepare(drafting, [1], seq_lens=[MAX_MODEL_LEN - 2], num_sampled=[1], num_rejected=[0])
    drafting._draft(1, 1, None, None, None, None)
    assert drafting.idx_mapping[0] == 1  # the last position there is
    drafting._draft(1, 1, None, None, None, None)
    assert drafting.idx_mapping[0] == -1
    assert drafting.input_buffers.positions[0] == MAX_MODEL_LEN - 1


def test_dummy_rows_write_nothing(drafting):
    prepare(drafting, [-1, -1], seq_lens=[3, 3], num_sampled=[1, 1], num_rejected=[0, 0])
    for _ in range(K):
        drafting._draft(2, 2, None, None, None, None)
    assert drafting.idx_mapping.tolist() == [-1] * MAX_REQS
    assert drafting._inputs.columns[:2].tolist() == [0, 0]  # and capturing any number of steps stays inside the drafts


def test_memory_is_profiled_before_there_is_a_kv_cache(modules, drafting):
    drafting.block_tables = None  # as `__init__` leaves it: `set_attn` comes later
    del drafting._kv_group
    prepare(drafting, [-1, -1], seq_lens=[3, 3], num_sampled=[1, 1], num_rejected=[0, 0])
    graph = SimpleNamespace(cg_mode=modules.steps.CUDAGraphMode.NONE, num_tokens=2)
    drafting._run_step(1, 2, graph, None, skip_attn=True)
    assert drafting.idx_mapping.tolist() == [-1] * MAX_REQS


@pytest.mark.parametrize("in_graph", [False, True], ids=["metadata rebuilt", "metadata in the graph"])
def test_a_graph_is_replayed_once_a_step(modules, drafting, monkeypatch, in_graph):
    calls = []
    full = modules.steps.CUDAGraphMode.FULL
    drafting._graphs = {False: SimpleNamespace(run_fullgraph=lambda graph: calls.append("replay"))}
    drafting.supports_decode_metadata_update = in_graph
    group = SimpleNamespace(map_to_kernel_block_table=lambda table: calls.append("block table"))
    drafting.attn_groups, drafting.block_tables.input_block_tables = [[group]], [None]
    monkeypatch.setattr(modules.steps.DraftSteps, "_map_slots", lambda self, *args: calls.append("slots"))
    build = "_build_uniform_attn_metadata"
    monkeypatch.setattr(modules.steps.DraftSteps, build, lambda self, **kwargs: calls.append("metadata"))
    graph = SimpleNamespace(cg_mode=full, num_tokens=2)
    for step in (1, 2):
        drafting._run_step(step, 2, graph, None, skip_attn=False)
    expected = ["block table", "replay", "replay"] if in_graph else ["slots", "metadata", "replay"] * 2
    assert calls == expected


def states_of(slots):
    from vllm_eesd.host.v2.batch import RequestStates

    return RequestStates(SimpleNamespace(num_speculative_steps=K, req_id_to_index=slots))


def test_scheduled_drafts_are_trimmed_to_each_requests_length(modules):
    states = states_of({"a": 2, "b": 0, "c": 1})
    num_drafted = np.array([0, 3, 2, 0])
    query_start_loc = torch.zeros(5, dtype=torch.int32)
    ragged = modules.ragged.RaggedVerification(states, query_start_loc, num_drafted, reallocate_of_0_32)
    # c is a prompt chunk; the scheduler gave everybody else K placeholders.
    drafts = {"a": [-1] * K, "b": [-1] * K}
    assert ragged.get_num_tokens({"c": 7, "a": K + 1, "b": K + 1}, drafts) == 7 + 3 + 1
    tokens, cu_num_logits = ragged.compact_batch(
        np.array([K, K, 0]), np.array([K + 1, K + 1, 7]), np.array([0, 4, 8, 9])
    )
    assert tokens.tolist() == [3, 1, 7]
    assert cu_num_logits.tolist() == [0, 3, 4, 5]
    on_device, locations, num_drafts = ragged.reallocate_drafts(["a", "b", "c"], torch.tensor([2, 0, 1]))
    assert (on_device.tolist(), num_drafts) == ([0, 3, 4, 5], 2)
    assert locations is query_start_loc
    ragged.add_request(2)
    assert num_drafted.tolist() == [0, 3, 0, 0]


def test_nothing_is_verified_beside_a_request_that_names_its_logprobs(modules):
    """vLLM's rejection sampler would give it the likeliest tokens' (vLLM issue 42592)."""
    states, num_drafted, names = states_of({"a": 2, "b": 0}), np.array([2, 3, 1, 0]), np.array([False] * 4)
    options = {"reallocate": reallocate_of_0_32, "names_logprobs": names}
    ragged = modules.ragged.RaggedVerification(states, torch.zeros(5), num_drafted, **options)
    tokens, drafts = {"a": K + 1, "b": K + 1}, {"a": [-1] * K, "b": [-1] * K}
    assert ragged.get_num_tokens(tokens, drafts) == 2 + 3
    names[0] = True
    assert ragged.get_num_tokens(tokens, drafts) == 2
    assert num_drafted.tolist() == [0, 3, 0, 0]  # so that they do not count as rejected
    assert ragged.compact_batch(np.array([K, K]), np.array([K + 1, K + 1]), np.array([0, 4, 8]))[1].tolist() == [
        0,
        1,
        2,
    ]


def reallocate_of_0_32(self, req_ids, idx_mapping) -> tuple[torch.Tensor, torch.Tensor, int]:
    """vLLM 0.32's signature."""


def reallocate_of_0_33(self, req_ids, idx_mapping) -> tuple[torch.Tensor, torch.Tensor, int, "object | None"]:
    """vLLM 0.33's: also the counts of admitted drafts, on their way to the host, or None where it knows them."""


def reallocate_of_tomorrow(self, req_ids, idx_mapping) -> "AdmittedDrafts":  # noqa: F821
    """Nobody knows what."""


def test_as_many_values_as_the_runner_unpacks(modules):
    states = states_of({"a": 0})
    for reallocate, more in ((reallocate_of_0_32, ()), (reallocate_of_0_33, (None,))):
        ragged = modules.ragged.RaggedVerification(states, torch.zeros(5), np.zeros(4, dtype=np.int64), reallocate)
        ragged.get_num_tokens({"a": K + 1}, {"a": [-1] * K})
        assert ragged.reallocate_drafts(["a"], torch.tensor([0]))[2:] == (0, *more)
    with pytest.raises(RuntimeError, match="reallocate_drafts returns 'AdmittedDrafts'"):
        modules.ragged.RaggedVerification(states, torch.zeros(5), np.zeros(4), reallocate_of_tomorrow)
    modules.ragged.RaggedVerification(states, torch.zeros(5), np.zeros(4))  # the installed one's


def test_attention_planned_ahead_is_planned_for_the_captured_query_length(modules):
    """As a graph with drafts was captured, also for a step without any; a prompt's own length stays."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    tensors = dict.fromkeys(
        ("query_start_loc", "query_start_loc_cpu", "seq_lens", "block_table_tensor", "slot_mapping")
    )
    seen = []

    def build(common_prefix_len, common_attn_metadata, fast_build=False):
        seen.append((common_attn_metadata.max_query_len, common_attn_metadata.num_reqs, fast_build))

    for ahead in (True, False):
        builder = SimpleNamespace(aot_schedule=ahead, build=build)
        modules.ragged.plan_for_captured_queries(builder, K + 1)
        for length in (1, K, K + 1, 40):
            given = CommonAttentionMetadata(
                **tensors, num_reqs=3, num_actual_tokens=3, max_query_len=length, max_seq_len=9
            )
            builder.build(common_prefix_len=0, common_attn_metadata=given, fast_build=ahead)
            assert given.max_query_len == length  # it is shared with other groups
    of_tomorrow = type("Builder", (), {"__module__": "vllm.v1.attention.backends.flash_attn", "build": build})
    with pytest.raises(RuntimeError, match="does not say whether it plans steps ahead"):
        modules.ragged.plan_for_captured_queries(of_tomorrow(), K + 1)
    longest = [K + 1, K + 1, K + 1, 40]
    assert seen == [(length, 3, True) for length in longest] + [(n, 3, False) for n in (1, K, K + 1, 40)]


def test_the_installed_vllm_plans_flash_attention_3_ahead():
    """What `plan_for_captured_queries` asks a builder for is still called so."""
    source = Path(importlib.util.find_spec("vllm").origin).with_name("v1") / "attention" / "backends" / "flash_attn.py"
    text = source.read_text(encoding="utf-8")
    assert "self.aot_schedule = get_flash_attn_version() == 3" in text
    assert "max_query_len = common_attn_metadata.max_query_len" in text


@pytest.mark.parametrize(
    ("asked", "alone"),
    [
        ({"temperature": 0.5, "seed": 1, "logprobs": 2, "stop_token_ids": [3], "top_k": -1}, True),
        ({"top_k": 3}, False),
        ({"top_p": 0.9}, False),
        ({"min_p": 0.1}, False),
        ({"min_tokens": 3}, False),
        ({"presence_penalty": 1.0}, False),
        ({"bad_words": ["a"]}, False),
        ({"logit_bias": {1: 2.0}}, False),
        ({"allowed_token_ids": [1]}, False),
    ],
)
def test_what_else_changes_logits_is_vllms_to_verify(modules, asked, alone):
    from vllm import SamplingParams

    assert modules.verification.only_temperature(SamplingParams(**asked)) == alone


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("watermark_key", 1),
        ("synthetic_conditional_rates", torch.ones(1)),
        ("fly_window_size", 2),  # vLLM 0.33's lossy verification
        ("sampler.use_fp64_gumbel", True),
        ("sampler.return_sampling_mask", True),
        ("sampler.trace_replay_state", object()),
        ("sampler.logprobs_mode", "processed_logprobs"),
        ("sampler.logits_processors", [object()]),
    ],
)
def test_engines_that_sample_otherwise_verify_by_vllm(modules, name, value):
    sampler = SimpleNamespace(
        use_fp64_gumbel=False,
        return_sampling_mask=False,
        trace_replay_state=None,
        logprobs_mode="raw_logprobs",
        logits_processors=[],
    )
    judge = SimpleNamespace(watermark_key=None, synthetic_conditional_rates=None, sampler=sampler)
    assert modules.verification.can_verify(judge)
    setattr(sampler if "." in name else judge, name.rpartition(".")[2], value)
    assert not modules.verification.can_verify(judge)
