"""An engine that is paused for a minute while requests run: no step has taken it, for costs or for counters."""

import pytest

MINUTE_MS = 60e3
#: A few steps of some forty are drafted otherwise, or are not counted; a minute is a thousand times all of them.
SIMILAR = 0.2
PROMPTS = [[5, 17, 300, 2], [9, 9, 8]]


@pytest.fixture
def ask(engine, step_times, random_target, cloned_head, drafter_of):
    """Return ask(pause): (texts, (ms counted, ms in plain steps, steps), curves of costs)."""
    from vllm import SamplingParams

    from vllm_eesd.host.v1 import proposer

    step_times(draft_step_ms=0.5)

    def with_a_pause(pause):
        spec = {"method": "eesd", "model": cloned_head(random_target, 7, 7), "num_speculative_tokens": 4}
        with engine(random_target, spec) as llm:
            core = llm.llm_engine.engine_core.engine_core
            params = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=80)
            for name, prompt in enumerate(PROMPTS):
                llm.llm_engine.add_request(str(name), {"prompt_token_ids": prompt}, params)
            texts, num_steps = {}, 0
            while llm.llm_engine.has_unfinished_requests():
                for output in llm.llm_engine.step():
                    texts[output.request_id] = list(output.outputs[0].token_ids)
                num_steps += 1
                if pause and num_steps in (3, 9, 12):
                    core.pause_scheduler("keep", clear_cache=False)
                    assert llm.llm_engine.step() == []
                    type(proposer.time).now += MINUTE_MS / 1e3
                    core.resume_scheduler()
            stats, costs = drafter_of(llm).stats, drafter_of(llm).policy.costs
            curves = costs.verify_curve(2, 8).tolist(), costs.draft_curve(2).tolist()
        return texts, (stats.decode_ms, stats.plain_ms, num_steps), curves

    return with_a_pause


@pytest.mark.feature("a pause of a minute (`/pause`, `/resume`) while requests run", "no step has taken it")
def test_a_pause_is_nobodys_time(ask):
    texts, (decode_ms, plain_ms, num_steps), curves = ask(pause=False)
    paused_texts, (paused_decode_ms, paused_plain_ms, paused_steps), paused_curves = ask(pause=True)
    assert paused_texts == texts and min(num_steps, paused_steps) > 15
    # Three times less is known then, so that a draft here or there may be of another length.
    for paused_curve, curve in zip(paused_curves, curves, strict=True):
        assert paused_curve == pytest.approx(curve, rel=SIMILAR)
    assert paused_decode_ms == pytest.approx(decode_ms, rel=SIMILAR)
    assert paused_plain_ms / paused_decode_ms == pytest.approx(plain_ms / decode_ms, rel=SIMILAR)


def test_a_pause_that_counts_is_noticed(ask, monkeypatch):
    from vllm_eesd.round import outcome

    monkeypatch.setattr(outcome.Learner, "_is_pause", lambda self, times: False)
    _, (decode_ms, *_), _ = ask(pause=True)
    assert decode_ms > MINUTE_MS
