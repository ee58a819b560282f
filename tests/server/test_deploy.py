"""The deployment files agree with the server: flags, ports, routes, times and names. Nothing here runs a container."""

from __future__ import annotations

import json
import re
import runpy
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from fastapi.testclient import TestClient

from server.cli import parse
from server.config import ServerConfig
from server.options.flags import API_KEY_VARIABLE, engine_config_of, server_config_of
from tests import tiny_tokenizers
from tests.fake_engine import FakeEngine

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "server" / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
YAMLS = sorted(DEPLOY.rglob("*.y*ml"))


def documents(path: str) -> dict[str, dict[str, Any]]:
    """Kind -> Kubernetes object."""
    return {document["kind"]: document for document in yaml.safe_load_all((DEPLOY / path).read_text())}


def instruction(name: str) -> list[str]:
    """What follows each `NAME` in the Dockerfile, with continued lines joined."""
    text = DOCKERFILE.replace("\\\n", " ")
    return [line.removeprefix(name).strip() for line in text.splitlines() if line.startswith(name + " ")]


def with_defaults(text: str) -> str:
    """`${NAME:-default}` as compose reads it without a variable of that name."""
    return re.sub(r"\$\{\w+:?-?([^}]*)\}", r"\1", text)


def server_options(arguments: list[str]) -> ServerConfig:
    """Of the container's command line."""
    (entrypoint,) = map(json.loads, instruction("ENTRYPOINT"))
    assert entrypoint[0] == "jaxpaged"
    parsed = parse([*entrypoint[1:], *arguments])
    engine_config_of(parsed)
    return server_config_of(parsed)


COMPOSE = yaml.safe_load((DEPLOY / "docker-compose.yaml").read_text())
POD = documents("kubernetes/server.yaml")["StatefulSet"]["spec"]["template"]["spec"]
KSERVE_POD = documents("kserve/runtime.yaml")["ServingRuntime"]["spec"]
KSERVE_SERVICE = documents("kserve/service.yaml")["InferenceService"]["spec"]["predictor"]


@pytest.fixture
def http(fake_app):
    """A client of a server with a key."""
    with TestClient(fake_app) as client:
        yield client


@pytest.fixture
def fake_app():
    from jaxpaged.engine.async_llm import AsyncLLM
    from jaxpaged.engine.in_process_client import InProcessClient
    from server.app import create_app

    tokenizer = tiny_tokenizers.byte_level()
    llm = AsyncLLM(InProcessClient(FakeEngine([5], vocab_size=tokenizer.vocab_size), tokenizer), tokenizer)
    return create_app(llm, ServerConfig(served_model_name=("m",), api_key=("secret",)))


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: str(path.relative_to(DEPLOY)))
def test_yaml_parses(path) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        assert document
        if path.parent.name in ("kubernetes", "prometheus-operator", "kserve"):
            assert document["apiVersion"] and document["kind"] and document["metadata"]["name"]


def test_the_image_holds_what_exists() -> None:
    sources = [word for copy in instruction("COPY") if "--from" not in copy for word in copy.split()[:-1]]
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    for source in sources:
        assert (ROOT / source).exists() and f"!{source}" in ignored
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert set(packages["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) <= set(sources)
    extras = set(packages["project"]["optional-dependencies"])
    named = re.findall(r"EXTRA=(\w+)", DOCKERFILE + (DEPLOY / "README.md").read_text())
    assert {"cuda12", "tpu"} <= set(named) <= extras
    assert (
        f"${{EXTRA-{instruction('ARG')[1].partition('=')[2]}}}"
        == COMPOSE["services"]["jaxpaged"]["build"]["args"]["EXTRA"]
    )


def test_the_image_runs_as_nobody_in_particular_and_keeps_its_cache() -> None:
    assert instruction("USER") == ["1000:1000"] and POD["securityContext"]["runAsUser"] == 1000
    (volume,) = instruction("VOLUME")
    (entrypoint,) = instruction("ENTRYPOINT")
    assert f"--compilation-cache-dir={volume}/" in entrypoint and f"HF_HOME={volume}/" in DOCKERFILE
    mounts = {mount["mountPath"] for mount in POD["containers"][0]["volumeMounts"]}
    assert volume in mounts and COMPOSE["services"]["jaxpaged"]["volumes"] == [f"cache:{volume}"]


def test_the_image_is_probed_where_it_listens(http) -> None:
    config = server_options(["m"])
    (check,) = instruction("HEALTHCHECK")
    (url,) = re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", check)
    assert int(url[0]) == config.port == int(instruction("EXPOSE")[0]) and http.get(url[1]).status_code == 200


def test_compose(http) -> None:
    service = COMPOSE["services"]["jaxpaged"]
    config = server_options([with_defaults(word) for word in service["command"]])
    assert config.served_model_name == ("default",)
    assert service["ports"][0].endswith(f":{config.port}")
    assert int(service["stop_grace_period"].removesuffix("s")) > config.shutdown_timeout
    assert API_KEY_VARIABLE in service["environment"]
    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).samefile(DEPLOY / "Dockerfile")
    for other in ("prometheus", "grafana"):
        for volume in COMPOSE["services"][other]["volumes"]:
            assert (DEPLOY / volume.split(":")[0]).is_dir()
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    (job,) = scraped["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"jaxpaged:{config.port}"]}]
    assert job["authorization"]["credentials_file"] == f"/run/secrets/{COMPOSE['services']['prometheus']['secrets'][0]}"
    assert all((DEPLOY / "prometheus" / name).is_file() for name in scraped["rule_files"])
    assert http.get(job["metrics_path"], headers={"Authorization": "Bearer secret"}).status_code == 200


def test_kubernetes(http) -> None:
    (container,) = POD["containers"]
    config = server_options(container["args"])
    (port,) = container["ports"]
    assert port["containerPort"] == config.port
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        get = container[probe]["httpGet"]
        assert get["port"] == port["name"] and http.get(get["path"]).status_code == 200  # without a key
    pause = float(container["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert POD["terminationGracePeriodSeconds"] >= pause + config.shutdown_timeout + 5
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    volumes = {volume["name"] for volume in POD["volumes"]}
    templates = documents("kubernetes/server.yaml")["StatefulSet"]["spec"]["volumeClaimTemplates"]
    claimed = {template["metadata"]["name"] for template in templates}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes | claimed


def test_kubernetes_objects_name_each_other(http) -> None:
    server = documents("kubernetes/server.yaml")
    stateful, service = server["StatefulSet"], server["Service"]
    labels = stateful["spec"]["template"]["metadata"]["labels"]
    assert stateful["spec"]["selector"]["matchLabels"] == service["spec"]["selector"] == labels
    assert stateful["spec"]["serviceName"] == service["metadata"]["name"]
    (port,) = POD["containers"][0]["ports"]
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    text = (DEPLOY / "kubernetes" / "server.yaml").read_text()
    ((secret, key),) = re.findall(r"kubectl create secret generic (\w+) --from-literal=([\w-]+)=", text)
    for variable in POD["containers"][0]["env"]:
        reference = variable["valueFrom"]["secretKeyRef"]
        assert reference["name"] == secret and (reference["key"] == key or reference.get("optional"))
    assert POD["containers"][0]["env"][0]["name"] == API_KEY_VARIABLE
    monitor = documents("kubernetes/prometheus-operator/podmonitor.yaml")["PodMonitor"]["spec"]
    assert monitor["selector"]["matchLabels"] == labels
    (job,) = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    assert labels[monitor["jobLabel"]] == job["job_name"]  # the alerts select by it
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert endpoint["port"] == port["name"]
    assert endpoint["authorization"]["credentials"] == {"name": secret, "key": key}
    assert http.get(endpoint["path"], headers={"Authorization": "Bearer secret"}).status_code == 200


def test_kserve(http) -> None:
    (container,) = KSERVE_POD["containers"]
    assert container["name"] == "kserve-container"
    config = server_options([*container["args"], *KSERVE_SERVICE["model"]["args"]])
    assert config.port == container["ports"][0]["containerPort"]
    assert KSERVE_POD["annotations"]["prometheus.kserve.io/port"] == str(config.port)
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        get = container[probe]["httpGet"]
        assert get["port"] == config.port and http.get(get["path"]).status_code == 200
    assert KSERVE_SERVICE["terminationGracePeriodSeconds"] > config.shutdown_timeout
    service = documents("kserve/service.yaml")["InferenceService"]["metadata"]
    assert service["annotations"]["serving.kserve.io/deploymentMode"] == "RawDeployment"  # Knative refuses that field
    model = KSERVE_SERVICE["model"]
    assert model["runtime"] == documents("kserve/runtime.yaml")["ServingRuntime"]["metadata"]["name"]
    assert model["modelFormat"]["name"] in {format_["name"] for format_ in KSERVE_POD["supportedModelFormats"]}
    assert model["env"][0]["name"] == API_KEY_VARIABLE
    assert "optional" not in model["env"][0]["valueFrom"]["secretKeyRef"]  # without its secret a server is open to all
    assert {mount["name"] for mount in container["volumeMounts"]} == {v["name"] for v in KSERVE_POD["volumes"]}


def test_ray_serve(monkeypatch) -> None:
    """With a stand-in for Ray, which notes what it is given."""
    made: dict[str, Any] = {}

    def ingress(builder):
        made["build"] = builder
        return lambda replica: made.update(replica=replica) or "ingress"

    def deployment(**options):
        made["options"] = options
        return lambda target: type("Deployment", (), {"bind": lambda self: ("application", target)})()

    ray, serve = ModuleType("ray"), ModuleType("ray.serve")
    serve.ingress, serve.deployment, ray.serve = ingress, deployment, serve  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setenv("REPLICAS", "2")
    monkeypatch.setenv("MODEL", "org/m")
    monkeypatch.setenv(API_KEY_VARIABLE, "secret")
    names = runpy.run_path(str(DEPLOY / "rayserve" / "serve_app.py"))
    assert names["app"] == ("application", "ingress")
    assert made["options"]["num_replicas"] == 2 and made["options"]["ray_actor_options"] == {"num_gpus": 1.0}

    tokenizer = tiny_tokenizers.byte_level()
    engine = FakeEngine([5], vocab_size=tokenizer.vocab_size)
    monkeypatch.setattr("jaxpaged.engine.load.load_engine", lambda config: (engine, tokenizer))
    replica = made["replica"]()
    replica.app = made["build"]()
    with TestClient(replica.app) as client:
        replica.check_health()
        assert client.get("/v1/models").status_code == 401
        models = client.get("/v1/models", headers={"Authorization": "Bearer secret"}).json()
        engine.fail_with = RuntimeError("the device is lost")
        client.post("/v1/completions", headers={"Authorization": "Bearer secret"}, json={"prompt": "x"})
        with pytest.raises(RuntimeError, match="failed"):
            replica.check_health()
    assert [model["id"] for model in models["data"]] == ["org/m"]


def test_the_readme_names_every_file() -> None:
    text = (DEPLOY / "README.md").read_text()
    for path in DEPLOY.iterdir():
        if not fnmatch(path.name, "*.dockerignore") and path.name not in ("README.md", "__pycache__"):
            assert f"`{path.name}" in text
    for command in re.findall(r"jaxpaged serve [^`\n]+", text):
        parse(command.split()[1:])
