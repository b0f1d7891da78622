"""Manifests that a cluster could be given: their schema, what a pod may do, whom it may reach."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import numpy as np
import pytest
import redis
import yaml

from recprune import InputError, RecpruneError, write_shards
from recprune.commands.serve import settings_of
from recprune.serve.configuration import ServeSettings
from recprune.serve.setting_sources import PREFIX
from tests.support.histories_places import free_port

ROOT = Path(__file__).parents[1]
MANIFESTS = sorted((ROOT / "deploy").rglob("*.yaml"))
# The oldest Kubernetes that knows all fields used here, and the newest that the package knows.
VERSIONS = ("1.30", kubernetes_validate.latest_version())
OURS = "registry.example.com/"


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def walk(value: Any) -> Iterator[tuple[str, Any]]:
    """Every key of a document with its value, at any depth."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key, inner
            yield from walk(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from walk(inner)


DOCUMENTS = [document for path in MANIFESTS for document in documents(path)]


def name_of(document: Any) -> str:
    return f"{document['kind']}/{document['metadata']['name']}"


def templates_of(document: Any) -> list[Any]:
    """Every template of pods, at any depth."""
    return [
        value
        for key, value in walk(document)
        if key in ("template", "submitterPodTemplate") and "containers" in value["spec"]
    ]


TEMPLATES = [template for document in DOCUMENTS for template in templates_of(document)]
CONTAINERS = [container for template in TEMPLATES for container in template["spec"]["containers"]]
each_container = pytest.mark.parametrize("container", CONTAINERS, ids=lambda one: one["name"])


def every(kind: str) -> list[Any]:
    return [document for document in DOCUMENTS if document["kind"] == kind]


# Schema ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_a_manifest_is_what_kubernetes_expects(document: Any, version: str) -> None:
    if document["apiVersion"] != "ray.io/v1":
        kubernetes_validate.validate(document, version, strict=True)
    # Pods of Ray are ordinary pods inside of a resource that Kubernetes itself does not know.
    for template in templates_of(document):
        pods = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pods"}}
        kubernetes_validate.validate({**pods, "template": template}, version, strict=True)


def test_an_unknown_field_is_found() -> None:
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "x"},
        "spec": {"prts": []},
    }
    with pytest.raises(kubernetes_validate.ValidationError, match="prts"):
        kubernetes_validate.validate(service, VERSIONS[0], strict=True)


@pytest.mark.parametrize("document", every("RayService") + every("RayJob"), ids=name_of)
def test_resources_of_kuberay_have_fields_that_it_knows(document: Any) -> None:
    """Fields of KubeRay 1.6, by hand: no package has its schema."""
    assert set(document) == {"apiVersion", "kind", "metadata", "spec"}
    cluster = document["spec"]
    if document["kind"] == "RayJob":
        assert set(document["spec"]) == {
            "backoffLimit",
            "entrypoint",
            "rayClusterSpec",
            "shutdownAfterJobFinishes",
            "submitterPodTemplate",
            "ttlSecondsAfterFinished",
        }
        cluster = document["spec"]["rayClusterSpec"]
    else:
        fields = {"excludeHeadPodFromServeSvc", "rayClusterConfig", "serveConfigV2"}
        assert set(document["spec"]) == fields
        cluster = document["spec"]["rayClusterConfig"]
    assert set(cluster) == {"authOptions", "headGroupSpec", "rayVersion", "workerGroupSpecs"}
    assert cluster["authOptions"] == {"mode": "token"}
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert f"\nray=={cluster['rayVersion']}\n" in constraints
    assert set(cluster["headGroupSpec"]) == {"rayStartParams", "template"}
    for group in cluster["workerGroupSpecs"]:
        sizes = {"minReplicas", "replicas", "maxReplicas"}
        assert set(group) == {"groupName", "rayStartParams", "template"} | sizes
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())


# What a pod may do -------------------------------------------------------------------------------


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_all_is_ours_and_in_one_namespace(document: Any) -> None:
    assert document["metadata"]["name"].startswith("recprune")
    if document["kind"] == "Namespace":
        levels = document["metadata"]["labels"]
        assert levels["pod-security.kubernetes.io/enforce"] == "restricted"
    else:
        assert document["metadata"]["namespace"] == "recprune"


@pytest.mark.parametrize(
    "template", TEMPLATES, ids=lambda template: template["metadata"]["labels"]["app"]
)
def test_a_pod_has_no_rights_to_spare(template: Any) -> None:
    spec = template["spec"]
    assert spec["automountServiceAccountToken"] is False
    security = spec["securityContext"]
    assert security["runAsNonRoot"] is True
    assert min(security["runAsUser"], security["runAsGroup"], security["fsGroup"]) > 0
    if spec["containers"][0]["image"].startswith(OURS):
        assert security["runAsUser"] == 10001, "the user of deploy/Dockerfile"
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & set(spec)
    for volume in spec["volumes"]:
        assert "hostPath" not in volume
        assert "sizeLimit" in volume.get("emptyDir", {"sizeLimit": None}), "or it fills the node"


@each_container
def test_a_container_has_limits_and_a_root_that_it_cannot_write(container: Any) -> None:
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    for kind in ("requests", "limits"):
        assert set(container["resources"][kind]) == {"cpu", "memory"}
    paths = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    if container["image"].startswith(OURS):
        assert "/tmp" in paths, "the home of that user"


@each_container
def test_a_container_that_serves_has_probes(container: Any) -> None:
    probes = {"startupProbe", "readinessProbe", "livenessProbe"}
    expected = set() if container["name"] == "ray-job-submitter" else probes
    assert probes & set(container) == expected
    ports = {port["name"] for port in container.get("ports", [])}
    for probe in expected:
        port = next((value for key, value in walk(container[probe]) if key == "port"), None)
        # Of Ray, the port of its dashboard's agent, which is no port of ours to name.
        assert port is None or port in ports | {52365}


@each_container
def test_an_image_has_a_tag_or_a_digest(container: Any) -> None:
    image = container["image"]
    assert re.fullmatch(r"[a-z0-9./-]+(:[\w.-]+)?(@sha256:[0-9a-f]{64})?", image)
    assert "@" in image or ":" in image.rpartition("/")[2]
    assert not image.endswith(":latest")
    if image.startswith(OURS):
        project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        assert f'\nversion = "{image.rpartition(":")[2]}"\n' in project
        # Of the two images, the one without Ray where Ray is not needed.
        assert ("/recprune-ray:" in image) == (container["name"] != "serve")


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_what_is_mounted_is_there(document: Any) -> None:
    claimed = {
        claim["metadata"]["name"]
        for claim in document.get("spec", {}).get("volumeClaimTemplates", [])
    }
    for template in templates_of(document):
        volumes = {volume["name"] for volume in template["spec"]["volumes"]}
        mounted = [
            mount["name"]
            for container in template["spec"]["containers"]
            for mount in container["volumeMounts"]
        ]
        assert set(mounted) == volumes | claimed
        for name in (
            volume["configMap"]["name"]
            for volume in template["spec"]["volumes"]
            if "configMap" in volume
        ):
            assert name in [other["metadata"]["name"] for other in every("ConfigMap")]


def test_what_has_replicas_has_a_budget_of_disruptions() -> None:
    budgets = [budget["spec"]["selector"]["matchLabels"] for budget in every("PodDisruptionBudget")]
    expected = [
        workload["spec"]["selector"]["matchLabels"]
        for workload in every("Deployment") + every("StatefulSet")
        if workload["spec"]["replicas"] > 1
    ]
    for service in every("RayService"):  # a batch does its parts again
        expected += [
            group["template"]["metadata"]["labels"]
            for group in service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
            if group["replicas"] > 1
        ]
    assert len(expected) >= 2
    for labels in expected:
        assert labels in budgets


# Secrets -----------------------------------------------------------------------------------------


def test_no_secret_is_in_a_manifest() -> None:
    assert not every("Secret")
    for key, entries in (pair for document in DOCUMENTS for pair in walk(document)):
        if key == "env":
            for entry in entries:
                is_secret = re.search("PASSWORD|TOKEN|SECRET|KEY", entry["name"]) is not None
                assert is_secret == ("secretKeyRef" in entry.get("valueFrom", {})), entry["name"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in MANIFESTS)
    assert not re.search(r"://[^/\s]*:[^/\s]*@", text), "a password in a URL"
    assert not re.search(r"requirepass +[^\s\"]", text)


def test_every_secret_has_a_line_that_makes_it() -> None:
    needed = {
        value.get("secretName") or value.get("name")
        for document in DOCUMENTS
        for key, value in walk(document)
        if key in ("secret", "secretKeyRef")
    }
    guide = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    made = set(re.findall(r"create secret generic ([\w-]+)", guide))
    assert needed == made


# Whom a pod may reach ----------------------------------------------------------------------------


def selects(selector: Any, labels: dict[str, str]) -> bool:
    return all(
        labels.get(key) == value for key, value in selector.get("matchLabels", {}).items()
    ) and all(
        rule["operator"] == "In" and labels.get(rule["key"]) in rule["values"]
        for rule in selector.get("matchExpressions", [])
    )


def peer_matches(peer: Any, labels: dict[str, str], namespace: str) -> bool:
    names = {"kubernetes.io/metadata.name": namespace}
    in_namespace = (
        selects(peer["namespaceSelector"], names)
        if "namespaceSelector" in peer
        else namespace == "recprune"
    )
    return in_namespace and selects(peer.get("podSelector", {}), labels)


def lets(direction: str, ours: str, labels: dict[str, str], namespace: str, port: int) -> bool:
    """Whether the policies of a pod of ours let it talk to another, or be talked to."""
    policies = [
        policy["spec"]
        for policy in every("NetworkPolicy")
        if selects(policy["spec"]["podSelector"], {"app": ours})
        and direction.capitalize() in policy["spec"]["policyTypes"]
    ]
    assert policies, "without a policy everything is allowed"
    return any(
        any(
            peer_matches(peer, labels, namespace)
            for peer in rule["from" if direction == "ingress" else "to"]
        )
        and ("ports" not in rule or port in [entry["port"] for entry in rule["ports"]])
        for policy in policies
        for rule in policy.get(direction, [])
    )


def can_reach(source: str, target: str, port: int) -> bool:
    return lets("egress", source, {"app": target}, "recprune", port) and lets(
        "ingress", target, {"app": source}, "recprune", port
    )


def test_a_pod_without_a_policy_of_its_own_is_alone() -> None:
    alone = {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    assert alone in [policy["spec"] for policy in every("NetworkPolicy")]


def test_pods_reach_what_they_need_and_nothing_else() -> None:
    pods = {template["metadata"]["labels"]["app"] for template in TEMPLATES}
    assert pods == {f"recprune-{name}" for name in ("batch", "ray", "redis", "serve")}
    reached = {
        (source.removeprefix("recprune-"), target.removeprefix("recprune-"), port)
        for source in pods
        for target in pods
        for port in (6379, 8000, 8265, 10002)
        if can_reach(source, target, port)
    }
    everything = (6379, 8000, 8265, 10002)
    nodes = [("ray", "ray"), ("batch", "batch")]
    assert reached == {("serve", "redis", 6379), ("ray", "redis", 6379)} | {
        (source, target, port) for source, target in nodes for port in everything
    }


def test_others_reach_http_alone() -> None:
    everything = (6379, 8000, 8265, 10002)
    pods = {template["metadata"]["labels"]["app"] for template in TEMPLATES}
    for namespace, labels, expected in [
        ("ingress", {}, {("recprune-serve", 8000), ("recprune-ray", 8000)}),
        ("monitoring", {}, {("recprune-serve", 8000), ("recprune-ray", 8000)}),
        ("elsewhere", {"app": "recprune-serve"}, set()),
        (
            "operators",
            {"app.kubernetes.io/name": "kuberay-operator"},
            {("recprune-batch", 8265), ("recprune-ray", 8265), ("recprune-ray", 8000)},
        ),
    ]:
        reached = {
            (pod, port)
            for pod in pods
            for port in everything
            if lets("ingress", pod, labels, namespace, port)
        }
        assert reached == expected, namespace
    for pod in pods:
        assert lets("egress", pod, {"k8s-app": "kube-dns"}, "kube-system", 53)
        assert not lets("egress", pod, {}, "elsewhere", 443)


# What is run -------------------------------------------------------------------------------------


def commands() -> Iterator[list[str]]:
    """What a container or a job gives to `recprune`, in words."""
    for document in DOCUMENTS:
        for key, value in walk(document):
            if key == "entrypoint":
                words = shlex.split(value)
                yield words[words.index("recprune") + 1 :]
            elif key == "containers":
                for container in value:
                    if not container["image"].startswith(OURS) or "args" not in container:
                        continue
                    if "command" not in container:  # then it is the image's, which is recprune
                        yield container["args"]
                    else:
                        words = shlex.split(container["args"][0])
                        assert words[words.index("recprune") - 1] == "exec", "signals reach it"
                        yield words[words.index("recprune") + 1 :]


def test_commands_of_the_manifests_can_be_given() -> None:
    """What the cluster is told to run, our own command line understands."""
    found = list(commands())
    assert sorted(words[0] for words in found) == ["batch", "serve"]
    for words in found:
        parser = argparse.ArgumentParser(exit_on_error=False)
        importlib.import_module(f"recprune.commands.{words[0]}").add_arguments(parser)
        parsed = parser.parse_args(words[1:])
        if words[0] == "serve":
            given = settings_of(parsed).limits.model_fields_set
            assert "running" in given, "the default counts cores of the node"


def test_the_application_of_the_service_can_be_deployed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What KubeRay gives to Ray Serve: its schema, and our settings, with folders of ours."""
    pytest.importorskip("ray", reason="needs Ray: pip install 'recprune[ray]'")
    from ray.serve.schema import ServeDeploySchema

    (service,) = every("RayService")
    config = ServeDeploySchema(**yaml.safe_load(service["spec"]["serveConfigV2"]))
    (deployed,) = config.applications
    module, _, name = deployed.import_path.partition(":")
    build = getattr(importlib.import_module(module), name)
    monkeypatch.setenv(f"{PREFIX}HISTORY_PASSWORD", "c0ffee")
    with pytest.raises(RecpruneError, match="/data/recommender"):
        build(deployed.args)  # it is not here, and nothing else is wrong
    codes = np.random.default_rng(0).integers(0, 256, (300, 8)).astype(np.uint8)
    write_shards(codes, np.ones((8, 256, 2), np.float32), tmp_path / "shards", 2)
    ours = {**deployed.args, "folder": str(tmp_path / "shards"), "shards": None}
    built = build(ours)
    assert built._bound_deployment.name == "edge"
    assert built._bound_deployment.num_replicas == deployed.args["workers"]
    given, numbers, *shards = built._bound_deployment.init_args
    assert numbers == [0, 1]
    assert len(shards) == 2
    assert "c0ffee" not in str(given), "each edge reads it from its own variables"
    for name in ("history_password", "host"):
        with pytest.raises(InputError, match=f"{name} is no argument of this application"):
            build({**ours, name: "127.0.0.1"})
    with pytest.raises(InputError, match="cannot share the file of SQLite"):
        build({**ours, "history_url": "sqlite:////tmp/histories.db"})
    del ours["keys_file"]
    with pytest.raises(InputError, match="give --keys FILE"):
        build(ours)


def test_variables_of_the_manifests_are_settings_of_the_service() -> None:
    found = set(re.findall(r"\bRECPRUNE_\w+", "".join(path.read_text() for path in MANIFESTS)))
    assert found
    known = {PREFIX + name.upper() for name in ServeSettings.model_fields}
    assert found <= known


def test_redis_starts_as_the_manifest_says(tmp_path: Path) -> None:
    """The container's own script and probe, with its paths in a folder of ours."""
    if shutil.which("redis-server") is None:
        pytest.skip("needs redis-server (Debian: apt install redis-server)")
    (pods,) = every("StatefulSet")
    (container,) = pods["spec"]["template"]["spec"]["containers"]
    (configuration,) = every("ConfigMap")
    port = free_port()
    for mount in container["volumeMounts"]:
        (tmp_path / mount["mountPath"].lstrip("/")).mkdir(parents=True)

    def moved(text: str) -> str:
        for mount in container["volumeMounts"]:
            path = mount["mountPath"]
            text = re.sub(rf"(?<![\w/]){path}(?=[/\s])", f"{tmp_path}{path}", text)
        return text.replace("redis-cli", f"redis-cli -p {port}")

    text = moved(configuration["data"]["redis.conf"]).replace("bind * -::*", "bind 127.0.0.1")
    (tmp_path / "configuration" / "redis.conf").write_text(f"{text}port {port}\n", encoding="utf-8")
    (tmp_path / "password" / "password").write_text("c0ffee", encoding="utf-8")

    def probe(kind: str) -> int:
        shell = container[kind]["exec"]["command"]
        return subprocess.run([*shell[:-1], moved(shell[-1])], check=False).returncode

    script = [*container["command"], moved(container["args"][0])]
    server = subprocess.Popen(script, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        deadline = time.monotonic() + 20
        while probe("startupProbe") != 0:
            assert server.poll() is None
            assert time.monotonic() < deadline, "redis-server does not answer"
            time.sleep(0.1)
        assert probe("readinessProbe") == 0
        command_line = Path(f"/proc/{server.pid}/cmdline").read_bytes()
        assert command_line.startswith(b"redis-server"), "no shell in between"
        assert b"c0ffee" not in command_line
        written = tmp_path / "run" / "redis" / "redis.conf"
        assert written.stat().st_mode & 0o777 == 0o600
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(port=port).ping()
        with redis.Redis(port=port, password="c0ffee") as client:
            settings: Any = client.config_get("append*", "maxmemory-policy")
            assert (settings["appendonly"], settings["appendfsync"]) == ("yes", "always")
            assert settings["maxmemory-policy"] == "noeviction"
            client.set("event", "kept")
        (tmp_path / "password" / "password").write_text("another", encoding="utf-8")
        assert probe("readinessProbe") != 0
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        assert server.wait(20) == 0
    assert any((tmp_path / "data").rglob("*.aof"))
