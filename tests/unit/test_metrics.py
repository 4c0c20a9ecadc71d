"""EESD's counters on their way to /metrics: a file the worker keeps, a registry that reads it."""

import gc
import os
import time

import pytest

from vllm_eesd.files import replacing

metrics = pytest.importorskip("vllm_eesd.host.metrics")


def samples(registry=None):
    from prometheus_client import REGISTRY, generate_latest

    lines = generate_latest(registry or REGISTRY).decode().splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("eesd:")}


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def published(monkeypatch):
    """(directory, stats, breaker) of a worker that publishes, read by this process' registry."""
    from vllm_eesd.host.circuit_breaker import CircuitBreaker
    from vllm_eesd.round.counters import DraftStats

    monkeypatch.setattr(metrics, "PUBLISH_EVERY_S", 0.02)
    directory, stats = metrics.make_metrics_directory(), DraftStats(3)
    breaker = CircuitBreaker()
    metrics.publish(directory, 7, stats, breaker)
    return directory, stats, breaker


def test_what_a_worker_counts_is_at_the_registry(published):
    directory, stats, _ = published
    stats.count_lengths(2, 1)
    stats.count_lengths(0, 0)
    stats.count_time(decode_ms=500.0, plain_ms=750.0)
    until(lambda: samples().get('eesd:emitted_tokens_total{engine="7"}') == 3)
    read = samples()
    assert read['eesd:rounds_total{engine="7"}'] == 2
    assert read['eesd:drafted_tokens_total{engine="7"}'] == 2 and read['eesd:accepted_tokens_total{engine="7"}'] == 1
    assert read['eesd:decode_seconds_total{engine="7"}'] == 0.5 and read['eesd:plain_seconds_total{engine="7"}'] == 0.75
    assert [read[f'eesd:draft_length_rounds_total{{engine="7",length="{n}"}}'] for n in range(4)] == [1, 0, 1, 0]
    assert os.stat(directory).st_mode & 0o077 == 0


def test_a_file_that_is_being_written_is_not_read(published):
    directory, stats, _ = published
    with pytest.raises(KeyboardInterrupt), replacing(f"{directory}/8.json") as unfinished:
        unfinished.write_text("{")
        stats.count_lengths(2, 1)
        until(lambda: samples().get('eesd:rounds_total{engine="7"}') == 1)
        raise KeyboardInterrupt


def test_faults_and_the_open_breaker_are_at_the_registry(published, monkeypatch):
    from types import SimpleNamespace

    from vllm_eesd.host import circuit_breaker

    monkeypatch.setattr(circuit_breaker, "get_tp_group", lambda: SimpleNamespace(world_size=1))
    breaker = published[2]
    until(lambda: samples().get('eesd:speculation_off{engine="7"}') == 0)
    assert samples()['eesd:drafter_faults_total{engine="7"}'] == 0
    for _ in range(circuit_breaker.MAX_FAULTS):
        try:
            raise RuntimeError("injected")
        except RuntimeError as error:
            breaker.fault(error)
    until(lambda: samples()['eesd:speculation_off{engine="7"}'] == 1)
    assert samples()['eesd:drafter_faults_total{engine="7"}'] == circuit_breaker.MAX_FAULTS


def test_the_thread_ends_with_its_engine_or_its_reader(published):
    import shutil
    import threading

    def publishing():
        return sum(thread.name == "eesd-metrics" for thread in threading.enumerate())

    directory, stats, _ = published
    assert publishing() >= 1
    shutil.rmtree(directory)
    stats.count_lengths(1, 1)
    remaining = publishing()
    del stats, published
    gc.collect()
    until(lambda: publishing() < remaining)
    until(lambda: 'eesd:rounds_total{engine="7"}' not in samples())


def test_several_api_servers_read_every_engine_of_them(monkeypatch, tmp_path):
    """Where vLLM serves from several processes they read the directory that Prometheus' client keeps."""
    from prometheus_client import CollectorRegistry, values
    from prometheus_client.multiprocess import MultiProcessCollector

    from vllm_eesd.host.circuit_breaker import CircuitBreaker
    from vllm_eesd.round.counters import DraftStats

    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    monkeypatch.setattr(values, "ValueClass", values.MutexValue)  # as where it was imported before
    monkeypatch.setattr(metrics, "PUBLISH_EVERY_S", 0.02)
    engines = [DraftStats(3), DraftStats(3)]
    for number, stats in enumerate(engines):
        metrics.publish(str(tmp_path), number, stats, CircuitBreaker())
        stats.count_lengths(2, 1)
    engines[1].count_lengths(0, 0)

    def read():
        registry = CollectorRegistry()
        MultiProcessCollector(registry)
        return samples(registry)

    until(lambda: read().get('eesd:emitted_tokens_total{engine="1"}') == 3)
    until(lambda: read().get('eesd:emitted_tokens_total{engine="0"}') == 2)
    shown = read()
    assert [shown[f'eesd:draft_length_rounds_total{{engine="1",length="{n}"}}'] for n in range(4)] == [1, 0, 1, 0]
    assert shown['eesd:speculation_off{engine="0"}'] == 0
    engines[1].reset()
    engines[1].count_lengths(1, 1)  # counters never go back
    until(lambda: read().get('eesd:drafted_tokens_total{engine="1"}') == 2)
    until(lambda: read().get('eesd:draft_length_rounds_total{engine="1",length="1"}') == 1)
