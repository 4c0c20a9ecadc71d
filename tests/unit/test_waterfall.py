"""benchmarks/waterfall.py: times add up, the arithmetic is the one its page explains, and no timer is on thin air."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def waterfall():
    """A fresh module: timers stay out of vLLM's classes, pieces are the test's own."""
    spec = importlib.util.spec_from_file_location("waterfall", REPOSITORY / "benchmarks" / "waterfall.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(REPOSITORY / "benchmarks"))
        patch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
        spec.loader.exec_module(module)
        yield module


class Clock:
    now = 0.0

    def __call__(self):
        return self.now

    def spend(self, ms):
        self.now += ms / 1e3


CLOCK = Clock()


class Engine:
    """One step: 1 ms of its own, 2 to schedule, 5 in the runner of which 4 in the forward, 1 to take the output in."""

    def step(self):
        CLOCK.spend(1)
        scheduled = self.schedule()
        self.run()
        self.update(scheduled, SimpleNamespace(sampled_token_ids=[[7, 8], [9]]))

    def schedule(self):
        CLOCK.spend(2)
        return SimpleNamespace(
            num_scheduled_tokens={"a": 3, "b": 1}, total_num_scheduled_tokens=4, scheduled_new_reqs=[]
        )

    def run(self):
        CLOCK.spend(1)
        self.forward()

    def forward(self):
        CLOCK.spend(4)

    def update(self, scheduled, output):
        CLOCK.spend(1)


def test_a_steps_time_is_shared_out_among_its_pieces_without_rest(waterfall, monkeypatch):
    here = f"{__name__}:Engine."
    monkeypatch.setitem(__import__("sys").modules, __name__, SimpleNamespace(Engine=Engine))
    for name in ("step", "schedule", "run", "forward", "update"):
        monkeypatch.setattr(Engine, name, getattr(Engine, name))  # put back afterwards
    monkeypatch.setattr(waterfall, "STEP", here + "step")
    monkeypatch.setattr(waterfall, "SCHEDULE", here + "schedule")
    monkeypatch.setattr(waterfall, "UPDATE", here + "update")
    pieces = {
        waterfall.UNNAMED: ["step"],
        "scheduler": ["schedule", "update"],
        "runner": ["run"],
        "forward": ["forward"],
    }
    monkeypatch.setattr(waterfall, "PIECES", {piece: [here + n for n in names] for piece, names in pieces.items()})
    timers = waterfall.Timers(CLOCK)
    timers.install()
    Engine().forward()  # outside a step: not counted
    Engine().step()
    (step,) = timers.take()
    assert step.pieces == pytest.approx({waterfall.UNNAMED: 1, "scheduler": 3, "runner": 1, "forward": 4})
    assert step.ms == pytest.approx(9)
    assert (step.num_reqs, step.num_tokens, step.num_emitted, step.begins) == (2, 4, 3, False)
    assert timers.take() == []


def steps_of(waterfall, count=4, **given):
    pieces = {"model forward": 4.0, "scheduler": 0.5, waterfall.UNNAMED: 0.5} | given.pop("pieces", {})
    step = {"num_reqs": 2, "num_tokens": 2, "num_emitted": 2, "begins": False} | given
    return [waterfall.Step(dict.fromkeys(waterfall.PIECES, 0.0) | pieces, **step) for _ in range(count)]


def test_only_steps_in_which_the_whole_batch_decodes_count(waterfall):
    others = steps_of(waterfall, 1, num_reqs=1) + steps_of(waterfall, 1, begins=True)
    slow = steps_of(waterfall, 1, pieces={"scheduler": 100.0})
    found = waterfall.summary(steps_of(waterfall, num_tokens=6, num_emitted=5) + others + slow, 2)
    assert (found["steps"], found["outliers"], found["tokens"], found["drafts"]) == (4, 1, 5, 4)
    assert found["step_ms"] == 5.0 and found["explained"] == pytest.approx(1 - 0.5 / 5.0, abs=1e-4)
    with pytest.raises(ValueError, match="batch=2: no step"):
        waterfall.summary(others, 2)


def test_the_waterfall_leads_from_a_plain_step_to_the_round(waterfall):
    plain = waterfall.summary(steps_of(waterfall), 2)
    idle = waterfall.summary(steps_of(waterfall, pieces={"model forward": 4.25}), 2)
    drafting = {"model forward": 5.0, "draft forward": 1.5, "policy": 0.25, waterfall.UNNAMED: 0.75}
    eesd = waterfall.summary(steps_of(waterfall, pieces=drafting, num_emitted=6, num_draft_steps=3), 2)
    row = waterfall.compare(2, plain, idle, eesd, layers_share=0.125)
    told = dict(map(tuple, row["waterfall"]))
    assert told["plain step"] == 5.0 and told["draft forward"] == 1.5 and told["policy"] == 0.25
    assert told["KV fill"] == 0.25 and told["forward of the drafts"] == 0.75 and told["unnamed"] == 0.25
    assert sum(told.values()) == pytest.approx(eesd["step_ms"]) == 8.0
    # Three times the tokens, in 8 ms instead of 5; ideally in 6.5.
    assert row["measured_speedup"] == pytest.approx(3 * 5 / 8)
    assert row["ideal_speedup"] == pytest.approx(3 * 5 / 6.5, abs=1e-4)
    assert row["efficiency"] == pytest.approx(6.5 / 8, abs=1e-4)


def test_what_drafting_and_verifying_take_beside_what_they_must(waterfall):
    plain = {"model forward": 4.0, "LM head": 0.5, "scheduler": 0.5}
    drafting = plain | {"draft forward": 2.0, "scheduler": 0.75, "policy": 0.25}
    plain, idle, eesd = (
        waterfall.summary(steps_of(waterfall, pieces=pieces, num_draft_steps=steps), 2)
        for pieces, steps in ((plain, 0), (plain | {"policy": 0.55}, 0), (drafting, 2))
    )
    row = waterfall.compare(2, plain, idle, eesd, layers_share=0.125)
    assert row["draft_step_ratio"] == 1.0  # 2 steps of an eighth of 4 ms and the LM head's 0.5
    assert row["overhead_ratio"] == 1.5
    assert row["idle_ratio"] == pytest.approx(1.1)
    assert waterfall.compare(2, plain, idle, plain, layers_share=0.125)["draft_step_ratio"] is None


def test_a_draft_step_runs_through_the_first_layers_and_the_exit_layer(waterfall):
    assert waterfall.layers_share() == 3 / 12


def test_wrong_output_is_not_timed(waterfall):
    class Runner:
        def generate(self, kind, batch):
            return steps_of(waterfall), [[1, 2 if kind == "eesd" else 3]]

    with pytest.raises(SystemExit, match="the output of eesd is not plain's"):
        waterfall.measure(Runner(), 2, 1)


def test_every_timed_method_exists(waterfall):
    for targets in waterfall.PIECES.values():
        for target in targets:
            assert callable(waterfall.locate(target)[2])
    with pytest.raises(SystemExit, match="LLMEngine.stride is not there"):
        waterfall.locate(waterfall.STEP.replace("step", "stride"))
