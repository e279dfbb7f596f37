"""Two servers that most tests share: the tiny model, and the default real one."""

import pytest

pytest.importorskip(
    "fastapi", reason="the server's packages are not installed: pip install 'flyweight[serve]'"
)
pytest.importorskip("prometheus_client")
pytest.importorskip("uvicorn")

from tiny_server import make_model, serving
from tool_models import CONVERSATION, make_family, scripted


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="session")
def tiny(tiny_folder):
    with serving(
        tiny_folder, names=("tiny", "little"), max_body=1 << 20, engine={"max_num_seqs": 8}
    ) as running:
        yield running


@pytest.fixture(scope="session")
def real(smollm2):
    with serving(smollm2, names=("smollm2-135m",), engine={"max_model_len": 512}) as running:
        yield running


@pytest.fixture(scope="session")
def talking(tmp_path_factory):
    """A scripted model that speaks, thinks and calls tools as Qwen does."""
    folder = make_family("qwen", tmp_path_factory.mktemp("talking") / "model")
    with serving(folder, names=("talker",), engine_class=scripted(CONVERSATION)) as running:
        yield running
