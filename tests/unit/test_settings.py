import inspect
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
from ray.serve.schema import ServeDeploySchema

import deployments
from deployments.app import build_app
from deployments.retrieval import configured_store
from deployments.settings import AppArgs

SERVE_YAML = Path(deployments.__file__).parent / "serve.yaml"


def test_the_builders_annotation_is_a_class_that_serve_can_validate_with() -> None:
    (parameter,) = inspect.signature(build_app).parameters.values()
    assert isinstance(parameter.annotation, type), "a string annotation turns validation off"
    assert issubclass(parameter.annotation, BaseModel)


def test_serve_validates_the_arguments() -> None:
    with pytest.raises(ValidationError, match="max_batch_size"):
        call_user_app_builder_with_args_if_necessary(build_app, {"max_batch_size": 0})
    with pytest.raises(ValidationError, match="modle"):
        call_user_app_builder_with_args_if_necessary(build_app, {"modle": "x"})


def test_the_shipped_configuration_is_valid_and_names_real_deployments() -> None:
    config = ServeDeploySchema.model_validate(yaml.safe_load(SERVE_YAML.read_text()))
    (application,) = config.applications
    assert application.import_path == "deployments.app:build_app"
    AppArgs(**application.args)
    app = build_app(AppArgs(**application.args))
    names = {app._bound_deployment.name}
    todo = [app._bound_deployment]
    while todo:
        for argument in todo.pop().init_args:
            if hasattr(argument, "_bound_deployment"):
                names.add(argument._bound_deployment.name)
                todo.append(argument._bound_deployment)
    assert names == {"Gateway", "Target", "Valuation", "Retrieval"}
    assert {d.name for d in application.deployments} <= names
    assert "threshold_file" not in application.args, "args restart replicas"


def test_the_model_name_never_shows_a_path(tmp_path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    assert AppArgs(model=str(folder)).model_name == "my-model"
    assert AppArgs(model="org/name").model_name == "org/name"
    assert AppArgs(model=str(folder), served_model_name="x").model_name == "x"


def test_several_retrieval_replicas_share_a_store_or_are_refused() -> None:
    assert configured_store(AppArgs()) is None
    assert configured_store(AppArgs(num_retrieval_replicas=2, redis_url="redis://x")) == "redis://x"
    with pytest.raises(ValueError, match="2 retrieval replicas need one store"):
        configured_store(AppArgs(num_retrieval_replicas=2))


def test_ranks_have_a_bundle_each_on_one_node() -> None:
    def replica(**args: Any) -> Any:
        gateway = build_app(AppArgs(**args))._bound_deployment
        return gateway.init_args[1]._bound_deployment._replica_config

    assert replica().placement_group_bundles is None
    split = replica(device="cuda", tensor_parallel_size=4)
    assert split.placement_group_bundles == [{"CPU": 1, "GPU": 1}] * 4
    assert split.placement_group_strategy == "STRICT_PACK"
    assert replica(tensor_parallel_size=2).placement_group_bundles == [{"CPU": 1}] * 2
