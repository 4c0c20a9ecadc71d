"""Each place where vLLM 0.32 and 0.33 differ for EESD, against objects of either's shape."""

import functools
from types import SimpleNamespace

import pytest
import torch

from vllm_eesd.host import engine_seams
from vllm_eesd.host.v1 import seams as v1_seams
from vllm_eesd.host.v2 import seams as v2_seams


class Drafter:
    def __init__(self, order):
        self._order = order

    def profile_costs(self, runner):
        self._order.append("profile")


@pytest.mark.parametrize(
    ("attribute", "expected"),
    # On V1 vLLM then resets the random seed; on V2 its requests come first, which learning would take for a user's.
    [("drafter", ["profile", "vLLM"]), ("speculator", ["vLLM", "profile"])],
)
def test_costs_are_profiled_on_the_right_side_of_vllms_warm_up(attribute, expected):
    order = []

    def original(worker):
        order.append("vLLM")
        return "times"

    runner = SimpleNamespace(drafter=None, speculator=None)
    setattr(runner, attribute, Drafter(order))
    worker = SimpleNamespace(model_runner=runner)
    assert engine_seams.compile_or_warm_up_model(original, worker) == "times"
    assert order == expected


@pytest.mark.parametrize("drafter", [None, object()], ids=["no drafter", "a drafter of vLLM's"])
def test_other_workers_are_warmed_up_as_ever(drafter):
    worker = SimpleNamespace(model_runner=SimpleNamespace(drafter=drafter))
    assert engine_seams.compile_or_warm_up_model(lambda self: self, worker) is worker


@pytest.mark.parametrize("more", [{}, {"fly_window_size": None, "fly_entropy_threshold": None, "fly_entropy_top_k": 3}])
@pytest.mark.parametrize("drafts", [[3, 4], [3, -1]], ids=["drafts", "a placeholder"])
def test_rejection_sample_is_handed_all_it_is_called_with(more, drafts):
    """0.33 passes the three arguments of FLy; what a wrapper drops would silently be the default."""
    given = []

    def rejection_sample(draft_token_ids, num_draft_tokens, max_spec_len, cu_num, probs, *args, **kwargs):
        given.append((args, kwargs))
        return torch.tensor([[3, 4, 5]])

    cu_num_draft_tokens = torch.tensor([2])
    args = torch.zeros(2, 8), torch.tensor([[5]]), object()
    kwargs = {"synthetic_mode": False, "use_fp64_gumbel": True} | more
    v1_seams.rejection_sample(
        rejection_sample, torch.tensor(drafts), [2], 2, cu_num_draft_tokens, None, *args, **kwargs
    )
    assert given == [(args, kwargs)]


def manager_of_32(*, req_states, query_start_loc, vllm_config, attn_groups, target_layer_names=None):
    return "vLLM's"


def manager_of_33(
    *,
    req_states,
    query_start_loc,
    vllm_config,
    attn_groups,
    target_layer_names=None,
    copy_admitted_drafts_to_host=False,
):
    return "vLLM's"


@pytest.mark.parametrize(
    ("original", "more"), [(manager_of_32, {}), (manager_of_33, {"copy_admitted_drafts_to_host": True})]
)
def test_the_factory_of_verification_managers_may_be_told_more(monkeypatch, original, more):
    monkeypatch.setattr("vllm_eesd.host.v2.seams._speculator_of", lambda states: states)
    wrapped = functools.partial(v2_seams.maybe_create_adaptive_verification_manager, original)
    common = {"query_start_loc": "locations", "vllm_config": None, "attn_groups": [], **more}
    speculator = SimpleNamespace(ragged_verification=lambda locations, groups, layers: ("EESD's", locations))
    assert wrapped(req_states=speculator, **common) == ("EESD's", "locations")
    assert wrapped(req_states=None, **common) == "vLLM's"
