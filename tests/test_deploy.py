"""What is in deploy/: each file is checked against what it speaks of, so that it can't rot."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

from spec_serve.api.metrics import Meter, families
from spec_serve.api.settings import BY_KEY, parse
from spec_serve.spec.stats import EngineStats

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"


def manifests() -> list[dict[str, Any]]:
    text = (DEPLOY / "kubernetes" / "spec-serve.yaml").read_text()
    return list(yaml.safe_load_all(text))


def of_kind(kind: str) -> dict[str, Any]:
    return next(one for one in manifests() if one["kind"] == kind)


def test_kubernetes_takes_the_manifests() -> None:
    for manifest in manifests():
        kubernetes_validate.validate(manifest, "1.30", strict=True)


def test_the_parts_of_the_manifests_name_each_other() -> None:
    pod = of_kind("Deployment")["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    ports = {port["name"] for port in container["ports"]}
    service = of_kind("Service")["spec"]
    assert {port["targetPort"] for port in service["ports"]} == ports
    assert service["selector"].items() <= pod["metadata"]["labels"].items()
    claim = of_kind("PersistentVolumeClaim")["metadata"]["name"]
    assert any(v.get("persistentVolumeClaim", {}).get("claimName") == claim
               for v in pod["spec"]["volumes"])  # fmt: skip


def test_the_settings_in_the_manifests_are_settings() -> None:
    held = tomllib.loads(of_kind("ConfigMap")["data"]["serve.toml"])
    for key, value in held.items():
        parse(BY_KEY[key], value, "the manifest")
    grace = of_kind("Deployment")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert held["drain-s"] < grace, "killed while it still drains"


def test_the_image_holds_every_package() -> None:
    copied = re.findall(r"^COPY (\S+) \1$", (DEPLOY / "Dockerfile").read_text(), re.M)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = project["tool"]["setuptools"]["package-dir"].values()
    assert {folder.split("/")[0] for folder in folders} == set(copied)


def test_images_and_unit_use_real_variables() -> None:
    variables = {setting.variable for setting in BY_KEY.values()} | {"SPEC_SERVE_CACHE"}
    for name in ("Dockerfile", "spec-serve.service"):
        found = set(re.findall(r"SPEC_SERVE_[A-Z_]+", (DEPLOY / name).read_text()))
        assert found and found <= variables


def test_the_unit_waits_for_ready_and_for_a_drain() -> None:
    unit = (DEPLOY / "spec-serve.service").read_text()
    assert "\nType=notify\n" in unit
    stop = re.search(r"^TimeoutStopSec=(\d+)$", unit, re.M)
    drain = BY_KEY["drain-s"].default
    assert stop is not None and isinstance(drain, float) and int(stop[1]) > drain


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    meter = Meter()
    meter.by_position[0] = 1
    names = {
        sample.name
        for family in families(meter, EngineStats(), 1.0)
        for sample in family.samples
    } | {
        f"{family.name}_total" for family in families(meter, EngineStats(), 1.0)
        if family.type == "counter"
    }  # fmt: skip
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    asked = set(re.findall(r"specserve_\w+", json.dumps(dashboard)))
    assert len(asked) > 10 and asked <= names
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)
