"""The Kubernetes manifests are valid, and their environment starts a run of two launchers on this machine."""

from typing import Any

import kubernetes_validate
import pytest
import yaml
from ranks import REPOSITORY, SCRIPT, flags_of, read_metrics, run_nodes
from tests_tiny import tiny_settings

from megatron_neobert import errors

FOLDER = REPOSITORY / "examples" / "kubernetes"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def read_manifest(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.iterdir()))
def test_manifest_follows_the_schema_of_kubernetes(name):
    manifest = read_manifest(name)
    kubernetes_validate.validate(manifest, "1.31", strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**manifest, "spec": {**manifest["spec"], "completion": 2}}, "1.31", strict=True)


def test_job_ends_where_the_same_command_would_fail_again_and_restarts_for_free_after_a_stop():
    job = read_manifest("job")
    codes = {
        rule["action"]: set(rule["onExitCodes"]["values"]) for rule in job["spec"]["podFailurePolicy"]["rules"][:2]
    }
    all_codes = {value.exit_code for value in vars(errors).values() if hasattr(value, "exit_code")} - {1}
    assert codes == {
        "FailJob": all_codes - {errors.EXIT_UNAVAILABLE, errors.EXIT_IO_ERROR},
        "Ignore": {errors.EXIT_STOPPED_EARLY},
    }


def test_pods_may_write_the_claimed_volume_and_only_they_may_connect_to_each_other():
    pod, policy = read_manifest("job")["spec"]["template"]["spec"], read_manifest("network_policy")["spec"]
    claims = [volume["persistentVolumeClaim"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume]
    assert claims == [{"claimName": read_manifest("volume")["metadata"]["name"]}]
    assert read_manifest("volume")["spec"]["accessModes"] == ["ReadWriteMany"]
    user = pod["securityContext"]["runAsUser"]
    assert f"useradd --uid {user} " in (REPOSITORY / "containers" / "Dockerfile").read_text(encoding="utf-8")
    pods = {"podSelector": {"matchLabels": read_manifest("service")["spec"]["selector"]}}
    assert policy == {**pods, "policyTypes": ["Ingress"], "ingress": [{"from": [pods]}]}


def environment_of(job: dict[str, Any], *, index: int) -> dict[str, str]:
    """Return the variables of the pod with this completion index."""
    (container,) = job["spec"]["template"]["spec"]["containers"]
    variables = {}
    for item in container["env"]:
        if "valueFrom" in item:
            assert item["valueFrom"]["fieldRef"]["fieldPath"] == INDEX
        variables[item["name"]] = item.get("value", str(index))
    return variables


def test_pods_with_the_environment_of_the_manifest_train_one_run(tiny_corpus, tmp_path):
    """Two launchers of two ranks; only the address of the first pod and the port are this machine's."""
    job, service = read_manifest("job"), read_manifest("service")
    nodes = job["spec"]["completions"]
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    settings = tiny_settings(tiny_corpus, save=tmp_path / "run").with_section("training", train_iters=3)
    environments = [environment_of(job, index=index) for index in range(nodes)]
    for index, variables in enumerate(environments):
        assert (variables["NNODES"], variables["NODE_RANK"]) == (str(nodes), str(index))
        assert variables["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
        variables["NPROC_PER_NODE"] = "2"
    pods = run_nodes([["megatron_neobert.launch", SCRIPT, *flags_of(settings)]] * nodes, environments)
    assert [pod.code for pod in pods] == [0] * nodes, pods
    assert ["iteration 3/3" in pod.output for pod in pods] == [True, False], "rank 0 logs for all nodes"
    assert sorted(read_metrics(tmp_path / "run")) == [1, 2, 3]
