"""docs/grafana: the dashboard is one that Grafana loads, and asks for metrics that exist."""

import itertools
import json
import re
from pathlib import Path

import pytest
import yaml

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "grafana"
DASHBOARD = json.loads((FOLDER / "eesd.json").read_text(encoding="utf-8"))
PROMETHEUS = {"type": "prometheus", "uid": "${datasource}"}
#: Of Grafana's grid.
COLUMNS = 24


def queries(dashboard):
    """Every PromQL text, those of the variables too."""
    yield from (target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    yield from (v["query"]["query"] for v in dashboard["templating"]["list"] if v["type"] == "query")


def problems(dashboard):
    """What Grafana would not show, or not as it is meant."""
    found = [f"{name} is missing" for name in ("title", "uid", "time", "refresh") if not dashboard.get(name)]
    found += [] if dashboard.get("schemaVersion", 0) >= 36 else ["schemaVersion: data sources are objects from 36 on"]
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    if variables.get("datasource", {}).get("query") != "prometheus":
        found.append("no variable of the data source")
    asking = [variable for variable in variables.values() if variable["type"] == "query"]
    found += [f"variable {v['name']}: data source" for v in asking if v["datasource"] != PROMETHEUS]
    ids = [panel["id"] for panel in dashboard["panels"]]
    found += ["two panels have one id"] if len(set(ids)) < len(ids) else []
    places = {}
    for panel in dashboard["panels"]:
        title, at = panel["title"], panel["gridPos"]
        for place in itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])):
            if (other := places.setdefault(place, title)) != title or place[0] >= COLUMNS:
                found.append(f"{title}: over {other if other != title else 'the edge'}")
                break
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        found += [f"{title}: data source"] if any(source != PROMETHEUS for source in sources) else []
        letters = [target["refId"] for target in panel["targets"]]
        found += [f"{title}: refId"] if not letters or len(set(letters)) < len(letters) else []
    for text in queries(dashboard):
        found += (
            [f"brackets: {text}"] if text.count("(") != text.count(")") or text.count("{") != text.count("}") else []
        )
        asked = set(re.findall(r"\$(?!__)(\w+)", text))
        found += [f"no variable {name}" for name in sorted(asked - set(variables))]
    return found


def exported():
    """Names of the samples that the plugin and vLLM put at /metrics."""
    metrics = pytest.importorskip("vllm_eesd.host.metrics")
    vllm = Path(pytest.importorskip("vllm").__file__).parent
    sources = (vllm / "v1" / name for name in ("metrics/loggers.py", "spec_decode/metrics.py"))
    declared = {name for path in sources for name in re.findall(r'"(vllm:\w+)"', path.read_text(encoding="utf-8"))}
    ours = {f"eesd:{name}_total" for name in (*metrics.COUNTERS, metrics.LENGTHS)} | {f"eesd:{metrics.OFF}"}
    return ours | declared | {f"{name}_total" for name in declared}


def test_grafana_would_show_it():
    assert problems(DASHBOARD) == []
    (provider,) = yaml.safe_load((FOLDER / "provisioning.yaml").read_text(encoding="utf-8"))["providers"]
    assert provider["type"] == "file" and provider["options"]["path"]


def test_every_metric_asked_for_is_exported():
    asked = {name for text in queries(DASHBOARD) for name in re.findall(r"\b(?:vllm|eesd):\w+", text)}
    assert asked <= exported()
    assert {"eesd:rounds_total", "eesd:speculation_off", "vllm:generation_tokens_total"} <= asked


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda d: d["panels"][1].update(id=1), "two panels have one id"),
        (lambda d: d["panels"][1]["gridPos"].update(x=3), "over Estimated speedup"),
        (lambda d: d["panels"][3]["gridPos"].update(x=19), "over the edge"),
        (lambda d: d["panels"][0]["targets"][0].update(datasource=None), "data source"),
        (lambda d: d["panels"][0]["targets"][0].update(expr="sum(eesd:rounds_total{a=~'$node'}"), "no variable node"),
        (lambda d: d["templating"]["list"].pop(0), "no variable of the data source"),
    ],
)
def test_a_planted_mistake_is_found(change, complaint):
    dashboard = json.loads(json.dumps(DASHBOARD))
    change(dashboard)
    assert any(complaint in problem for problem in problems(dashboard))
