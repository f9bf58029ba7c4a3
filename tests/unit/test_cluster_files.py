"""The shipped cluster, Serve and Kubernetes files, against the schemas of what reads them."""

import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve.schema import ServeDeploySchema

from deployments.admission import MAX_OPEN_REQUESTS
from deployments.app import build_app
from deployments.settings import AppArgs

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deployments"
CLUSTERS = [ROOT / "cluster.yaml", FOLDER / "cluster.gcp.yaml", FOLDER / "cluster.local.yaml"]
SERVE_FILES = [FOLDER / "serve.yaml", FOLDER / "serve-local.yaml"]
MANIFESTS = sorted((FOLDER / "k8s").glob("*.yaml"))
KUBERAY_SCHEMA = yaml.safe_load((ROOT / "tests/support/kuberay-schema.yaml").read_text())
KUBERNETES = "1.34"
PINNED = dict(
    line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
)


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def serve_config(path: Path) -> ServeDeploySchema:
    return ServeDeploySchema.model_validate(load(path))


def deployments_of(config: ServeDeploySchema) -> dict[str, dict[str, Any]]:
    """Options of each deployment: those of the builder, overridden by the configuration."""
    (application,) = config.applications
    todo = [build_app(AppArgs(**application.args))._bound_deployment]
    options: dict[str, dict[str, Any]] = {}
    while todo:
        deployment = todo.pop()
        options[deployment.name] = {
            "ray_actor_options": deployment.ray_actor_options,
            "placement_group_bundles": deployment._replica_config.placement_group_bundles,
            "placement_group_strategy": deployment._replica_config.placement_group_strategy,
            **deployment._deployment_config.model_dump(),
        }
        for argument in deployment.init_args:
            if hasattr(argument, "_bound_deployment"):
                todo.append(argument._bound_deployment)
    for override in application.deployments:
        options[override.name] |= override.model_dump(exclude_unset=True)
    return options


def demand(options: Mapping[str, Any]) -> dict[str, float]:
    """What one replica takes of a node."""
    if bundles := options.get("placement_group_bundles"):
        assert options["placement_group_strategy"] == "STRICT_PACK"
        return dict(sum(map(Counter, bundles), Counter()))
    actor = options["ray_actor_options"]
    return {
        "CPU": actor.get("num_cpus") or 0,
        "GPU": actor.get("num_gpus") or 0,
        **(actor.get("resources") or {}),
    }


def greatest_number(options: Mapping[str, Any]) -> int:
    scaling = options["autoscaling_config"]
    return scaling["max_replicas"] if scaling else options["num_replicas"]


def pods(manifest: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every pod template, as a pod."""
    if {"containers"} <= manifest.keys():
        yield {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": manifest}
        return
    for value in manifest.values():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, dict):
                yield from pods(one)


def k8s_node_types() -> dict[str, dict[str, Any]]:
    """The worker groups of the RayService, as node types of a cluster file."""
    cluster = load(FOLDER / "k8s/rayservice.yaml")["spec"]["rayClusterConfig"]
    types = {}
    for group in cluster["workerGroupSpecs"]:
        (container,) = group["template"]["spec"]["containers"]
        limits = container["resources"]["limits"]
        custom = yaml.safe_load(yaml.safe_load(group["rayStartParams"].get("resources", "'{}'")))
        types[group["groupName"]] = {
            "max_workers": group["maxReplicas"],
            "resources": {
                "CPU": int(limits["cpu"]),
                "GPU": int(limits.get("nvidia.com/gpu", 0)),
                **custom,
            },
        }
    return types


NODE_TYPES = {
    "aws": load(CLUSTERS[0])["available_node_types"],
    "gcp": load(CLUSTERS[1])["available_node_types"],
    "kubernetes": k8s_node_types(),
}


# -- Ray's cluster launcher


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.name)
def test_ray_accepts_the_cluster_file(path) -> None:
    config = load(path)
    prepared = prepare_config(config)
    validate_config(prepared)
    if config["provider"]["type"] != "local":
        assert config["available_node_types"][config["head_node_type"]]["resources"] == {"CPU": 0}
    else:
        assert "--num-cpus=0" in config["head_start_ray_commands"][-1]


def test_ray_would_refuse_a_mistake() -> None:
    config = load(CLUSTERS[0])
    config["available_node_types"]["gpu"]["resource"] = {"GPU": 1}
    with pytest.raises(Exception, match="resource"):
        validate_config(prepare_config(config))


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.name)
def test_the_cluster_files_do_the_same_on_their_nodes(path) -> None:
    ours, aws = load(path), load(CLUSTERS[0])
    for field in ("file_mounts", "rsync_exclude", "head_setup_commands"):
        assert ours[field] == aws[field]
    assert ours["setup_commands"][0].startswith(aws["setup_commands"][0].removesuffix(" boto3"))
    for field in ("head_start_ray_commands", "worker_start_ray_commands"):
        for command, like in zip(ours[field], aws[field], strict=True):
            assert command.startswith(like)


# -- Serve


@pytest.mark.parametrize("path", SERVE_FILES, ids=lambda path: path.name)
def test_serve_and_our_settings_accept_the_serve_file(path) -> None:
    config = serve_config(path)
    (application,) = config.applications
    AppArgs(**application.args)
    named = {deployment.name for deployment in application.deployments}
    assert named <= {"Gateway", "Target", "Valuation", "Retrieval"} == deployments_of(config).keys()


def test_the_cluster_is_ready_for_load_and_for_going_down() -> None:
    serve, args = serve_config(FOLDER / "serve.yaml"), None
    args = AppArgs(**serve.applications[0].args)
    options = deployments_of(serve)
    assert serve.logging_config.encoding == "JSON"
    assert serve.http_options.request_timeout_s > args.request_timeout_s
    for name in ("Gateway", "Target"):
        assert options[name]["graceful_shutdown_timeout_s"] > args.request_timeout_s
    target, gateway = options["Target"], options["Gateway"]
    assert 0 < target["max_queued_requests"] <= target["max_ongoing_requests"]
    scaling = options["Target"]["autoscaling_config"]
    assert scaling["policy"]["policy_function"] == "deployments.autoscaling:LoadPolicy"
    assert options["Retrieval"]["num_replicas"] == 1, "one writer of the index"
    # What is too much is refused by the target or by the gateway, never by the proxy.
    held = scaling["max_replicas"] * (args.max_batch_size + args.max_waiting)
    assert held < gateway["num_replicas"] * MAX_OPEN_REQUESTS
    assert gateway["max_queued_requests"] == -1
    assert gateway["max_ongoing_requests"] > MAX_OPEN_REQUESTS


@pytest.mark.parametrize("where", NODE_TYPES)
def test_every_replica_fits_a_node_and_all_of_them_fit_the_cluster(where) -> None:
    """First fit, the greatest demand first, as many nodes as may be started."""
    free = [
        dict(kind["resources"])
        for kind in NODE_TYPES[where].values()
        for _ in range(kind.get("max_workers", 0))
    ]
    replicas = [
        (name, demand(options))
        for name, options in deployments_of(serve_config(FOLDER / "serve.yaml")).items()
        for _ in range(greatest_number(options))
    ]
    for name, wanted in sorted(replicas, key=lambda replica: -replica[1]["CPU"]):
        assert any(wanted.values()), f"{name} reserves nothing: Ray would put it on the head"
        fitting = [node for node in free if all(node.get(k, 0) >= v for k, v in wanted.items())]
        assert fitting, f"{name} needs {wanted}, which no node of {where} has left"
        for resource, amount in wanted.items():
            fitting[0][resource] = fitting[0].get(resource, 0) - amount


def test_the_commented_lines_put_all_ranks_of_a_replica_on_one_node() -> None:
    text = (FOLDER / "serve.yaml").read_text()
    for line in ("tensor_parallel_size", "placement_group_bundles", "placement_group_strategy"):
        assert f"# {line}: " in text
        text = text.replace(f"# {line}: ", f"{line}: ")
    config = ServeDeploySchema.model_validate(yaml.safe_load(text))
    num_ranks = AppArgs(**config.applications[0].args).tensor_parallel_size
    target = deployments_of(config)["Target"]
    assert len(target["placement_group_bundles"]) == num_ranks == 4
    actor = target["ray_actor_options"]
    for bundle in target["placement_group_bundles"]:
        assert bundle["CPU"] >= actor["num_cpus"]
        assert bundle["GPU"] >= actor["num_gpus"]
    # The node type that cluster.yaml names for it.
    (node,) = re.findall(r"g6.12xlarge, resources: (.*)", CLUSTERS[0].read_text())
    assert all(yaml.safe_load(node)[k] >= amount for k, amount in demand(target).items())


# -- Kubernetes


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_kubernetes_accepts_the_manifest(path) -> None:
    for manifest in yaml.safe_load_all(path.read_text()):
        if manifest["apiVersion"].startswith("ray.io/"):
            jsonschema.validate(manifest, KUBERAY_SCHEMA)
        else:
            kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
        for pod in pods(manifest):
            kubernetes_validate.validate(pod, KUBERNETES, strict=True)
            (container,) = pod["spec"]["containers"]
            assert pod["spec"]["securityContext"]["runAsNonRoot"]
            mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
            volumes = {volume["name"] for volume in pod["spec"].get("volumes", [])}
            claims = {
                c["metadata"]["name"] for c in manifest["spec"].get("volumeClaimTemplates", [])
            }
            assert mounted == volumes | claims


def test_the_schemas_would_refuse_a_mistake() -> None:
    service = load(FOLDER / "k8s/rayservice.yaml")
    service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["maxReplica"] = 3
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(service, KUBERAY_SCHEMA)
    pod = next(pods(load(FOLDER / "k8s/rayservice.yaml")))
    pod["spec"]["containers"][0]["resources"]["limit"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def test_kubernetes_serves_what_the_serve_file_says() -> None:
    service = load(FOLDER / "k8s/rayservice.yaml")["spec"]
    assert service["serveConfigV2"] == (FOLDER / "serve.yaml").read_text()


def test_versions_are_the_pinned_ones() -> None:
    for name in ("rayservice", "raycronjob"):
        text = (FOLDER / f"k8s/{name}.yaml").read_text()
        assert f"rayVersion: {PINNED['ray']}\n" in text
        assert "image: REGISTRY/valuspec:0.1.0" in text.replace("&image ", "")


# -- secrets


def test_secrets_are_made_once_and_are_nowhere_else(tmp_path) -> None:
    script, folder = FOLDER / "secrets.sh", tmp_path / "cluster"

    def make() -> dict[str, str]:
        subprocess.run(["sh", script, folder], check=True, capture_output=True)
        return {path.name: path.read_text() for path in folder.iterdir()}

    made = make()
    assert made == make()
    for name, content in made.items():
        assert (folder / name).stat().st_mode & 0o077 == 0, name
        assert content
    assert "ca-key.pem" not in made
    acl = made["users.acl"]
    assert "user default off" in acl
    assert acl.count(" #") == 3
    assert made["admin-password"].strip() not in "".join(
        set(made.values()) - {made["admin-password"]}
    )
    assert "RAY_AUTH_MODE=token" in made["cluster-env"]
    for text in [path.read_text() for path in (*CLUSTERS, *SERVE_FILES, *MANIFESTS)]:
        assert "://serving:" not in text
        assert "password:" not in text.lower().replace("redispassword:", "")


def test_the_node_script_is_a_shell_script_and_refuses_other_roles(tmp_path) -> None:
    script = FOLDER / "node.sh"
    subprocess.run(["sh", "-n", script], check=True)
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets/cluster-env").touch()
    wrong = subprocess.run(
        ["sh", script, "tail"], env={"HOME": str(tmp_path)}, capture_output=True, text=True
    )
    assert wrong.returncode == 2
    assert "tail" in wrong.stderr
