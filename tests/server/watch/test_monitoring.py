"""The dashboard, the alerts and Prometheus's own configuration: well formed, and about metrics that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

import server
from tests import tiny_tokenizers
from tests.server.conftest import LiveServer

DEPLOY = Path(server.__file__).parent / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana/dashboards/jaxpaged.json").read_text())
ALERTS = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
OF_PROMETHEUS = {"up"}
# Whose labels the queries may use: ours, and those that Prometheus adds.
KNOWN_LABELS = {"job", "instance"}


def queries() -> dict[str, str]:
    """Every PromQL expression, by where it stands."""
    found = {f"alert {rule['alert']}": rule["expr"] for rule in RULES}
    for panel in PANELS:
        for target in panel["targets"]:
            found[f"panel {panel['title']}, {target['refId']}"] = target["expr"]
    return found


def variables() -> list[str]:
    return [v["query"]["query"] for v in DASHBOARD["templating"]["list"] if v["type"] == "query"]


def metric_names(expression: str) -> set[str]:
    """The metrics of an expression: names that are neither functions, nor labels, nor operators."""
    bare = re.sub(r'"[^"]*"', "", expression)
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\b(?:by|without|on|ignoring)\s*\([^)]*\)", " ", bare)
    names = re.findall(r"[A-Za-z_:][\w:]*(?!\s*\()\b(?!\s*\()", bare)
    return {name for name in names if name not in {"or", "and", "unless", "bool", "offset", "by"}}


def label_names(expression: str) -> set[str]:
    matchers = re.findall(r"\{([^}]*)\}", expression)
    grouped = re.findall(r"\bby\s*\(([^)]*)\)", expression)
    names = [name for m in matchers for name in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", m)]
    return {*names, *(name.strip() for group in grouped for name in group.split(","))}


@pytest.fixture(scope="module")
def exposed() -> dict[str, set[str]]:
    """Every sample's name and labels after a load with all that the files name."""
    running = LiveServer(tiny_tokenizers.byte_level())
    try:
        assert running.post("/v1/completions", prompt="hello", max_tokens=3).status_code == 200
        assert running.post("/v1/completions", prompt=[]).status_code == 400
        text = running.http.get("/metrics").text
    finally:
        running.stop()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.mark.parametrize(
    "expression, names",
    [
        ("up == 0 or jaxpaged:healthy == 0", {"up", "jaxpaged:healthy"}),
        ('sum by (le, x) (rate(a:b_bucket{c=~"$d"}[5m]))', {"a:b_bucket"}),
        ('sum(rate(a{b="c"}[1m])) / (sum(rate(d_total[1m])) + e)', {"a", "d_total", "e"}),
    ],
)
def test_names_are_found(expression, names):
    assert metric_names(expression) == names


@pytest.mark.parametrize("where", list(queries()))
def test_every_metric_and_label_exists(exposed, where):
    expression = queries()[where]
    names = metric_names(expression) - OF_PROMETHEUS
    assert names or "up" in expression
    assert names <= exposed.keys(), f"{where} names what there is not"
    labels = set().union(*(exposed[name] for name in names)) | KNOWN_LABELS
    assert label_names(expression) <= labels, f"{where} selects by labels that there are not"


def test_variables_are_of_metrics_that_exist(exposed):
    for query in variables():
        match = re.fullmatch(r"label_values\((\S+), (\w+)\)", query)
        assert match and match[1] in exposed and match[2] in exposed[match[1]] | KNOWN_LABELS


def test_a_query_has_as_many_brackets_open_as_closed():
    for where, expression in queries().items():
        for opening, closing in ("()", "[]", "{}"):
            assert expression.count(opening) == expression.count(closing), where


def test_alerts_name_what_matters():
    wanted = {
        "JaxpagedDown", "JaxpagedKVCacheFull", "JaxpagedQueueLong", "JaxpagedSlowFirstToken", "JaxpagedServerErrors",
        "JaxpagedCompilesWhileServing", "JaxpagedPreemptions",
    }  # fmt: skip
    assert wanted <= {rule["alert"] for rule in RULES}
    for rule in RULES:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"] and rule["annotations"]["description"]


def test_panels_do_not_overlap_and_have_a_source():
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert all(panel["datasource"]["uid"] == "${datasource}" and panel["description"] for panel in PANELS)


def test_prometheus_scrapes_the_server_and_reads_the_alerts():
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    assert job["job_name"] == "jaxpaged" and job["metrics_path"] == "/metrics"
    assert all((DEPLOY / "prometheus" / name).is_file() for name in config["rule_files"])


def test_grafana_is_provisioned():
    folder = DEPLOY / "grafana/provisioning"
    (source,) = yaml.safe_load((folder / "datasources/prometheus.yml").read_text())["datasources"]
    (provider,) = yaml.safe_load((folder / "dashboards/jaxpaged.yml").read_text())["providers"]
    default = next(v for v in DASHBOARD["templating"]["list"] if v["name"] == "datasource")["current"]["value"]
    assert source["type"] == "prometheus" and source["uid"] == default
    assert provider["type"] == "file" and provider["options"]["path"] == "/var/lib/grafana/dashboards"
