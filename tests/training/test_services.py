"""The gateway as a run starts it: ports that are taken, servers that are not ours, keys that are wrong."""

import contextlib
import copy
import errno
import importlib.util
import json
import stat
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from agent.training import config as configs
from agent.training import services as module
from agent.training.rundir import RunDir
from agent.training.services import HOST, Services, free_port

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("agentlightning") is None, reason="starts the real gateway: needs the cpu or gpu extra"
)


@pytest.fixture(scope="module")
def config():
    return configs.compose("cpu")


@pytest.fixture
def services(tmp_path, config):
    run = RunDir(tmp_path / "run")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    made = Services(run, run.new_attempt(), config, scratch)
    yield made
    made.stop()
    assert not made.key_file.exists()


@contextlib.contextmanager
def old_gateway():
    """A server on a port that answers everything with 200, as an old gateway without a key would."""

    class Yes(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"[]")

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer((HOST, 0), Yes)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


def test_calls_to_the_gateway_go_through_no_proxy(services, monkeypatch):
    """httpx as agents and trainer use it, with a company's proxy in both spellings."""
    proxy = "http://proxy.corp:3128"
    for name, value in {"http_proxy": proxy, "HTTP_PROXY": proxy, "no_proxy": ".corp", "NO_PROXY": "x.org"}.items():
        monkeypatch.setenv(name, value)
    env = services.environment()
    assert env["no_proxy"] == env["NO_PROXY"] == "x.org,.corp,127.0.0.1,localhost"
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, env[name])
    assert urllib.request.proxy_bypass("127.0.0.1:8080") and not urllib.request.proxy_bypass("example.com")
    with httpx.Client() as client:
        assert client._transport_for_url(httpx.URL("http://127.0.0.1:8080")) is client._transport
        assert client._transport_for_url(httpx.URL("http://example.com")) is not client._transport


def test_a_gateway_that_is_given_up_is_ended(services):
    assert services.start_gateway(lambda: True) is False
    assert services.started["gateway"].exit_code is not None and not (services.folder / "gateway.url").exists()


def test_a_port_taken_by_an_old_gateway_is_left_for_another(services, monkeypatch):
    with old_gateway() as taken:
        ports = [taken, free_port()]
        monkeypatch.setattr(module, "free_port", lambda: ports.pop(0))
        services.start_gateway()
        assert services.url != f"http://{HOST}:{taken}" and ports == []
        bearer = {"Authorization": f"Bearer {services.key}"}
        answer = httpx.get(f"{services.url}/api/rollouts?state_in=queuing", headers=bearer, trust_env=False)
        assert answer.json() == []


def test_every_route_but_the_health_check_wants_the_key(services):
    services.start_gateway()
    routes = httpx.get(f"{services.url}/openapi.json", trust_env=False).json()["paths"]
    asked = 0
    with httpx.Client(base_url=services.url, trust_env=False) as client:
        for path, methods in routes.items():
            for method in methods:
                for headers in ({}, {"Authorization": "Bearer wrong"}, {"x-api-key": services.key[:-1]}):
                    address = path.replace("{", "").replace("}", "")
                    answer = client.request(method.upper(), address, headers=headers, json={})
                    wanted = 200 if path == "/healthz" else 401
                    assert answer.status_code == wanted, (method, path, answer.text)
                    asked += 1
    assert asked > 30


class FullDisk(type(Path())):
    def open(self, *arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device", str(self))


def test_a_full_disk_does_not_keep_a_run_from_being_ended(services, monkeypatch):
    services.start_gateway()
    monkeypatch.setattr(module, "shared_memory_note", lambda attempt: FullDisk(attempt / "shared-memory"))
    services.note_shared_memory()
    held = module.SHARED_MEMORY / f"sem.mmqa-{services.started['gateway'].process.pid}-test"
    held.touch()
    services.stop()
    assert services.started["gateway"].exit_code is not None and not services.key_file.exists()
    assert not held.exists(), "what could not be noted was remembered"


def test_a_model_path_with_other_letters_reaches_the_gateway(services):
    services.config = copy.deepcopy(services.config)
    services.config.actor_rollout_ref.model.path = '/home/jürgen/größe\'s "model", {x}'
    services.start_gateway()
    with httpx.Client(base_url=services.url, headers={"Authorization": f"Bearer {services.key}"}) as client:
        made = client.post("/api/rollouts", json=[{"input": {}, "config": {}}]).json()[0]["rollout_id"]
        models = [{"model": services.config.actor_rollout_ref.model.path, "endpoint": f"http://{HOST}:9/v1"}]
        client.post("/api/models", json=models).raise_for_status()
        said = client.post(
            f"/proxy/rollout/{made}/attempt/0/mode/train/openai/v1/chat/completions",
            json={"model": "auto", "messages": [{"role": "user", "content": "?"}]},
            timeout=60.0,
        )
    assert "No servers available" not in said.text, said.text


def test_the_key_is_made_for_the_attempt_and_in_no_command_line_and_no_log(services):
    psutil = pytest.importorskip("psutil")
    assert stat.S_IMODE(services.key_file.stat().st_mode) == 0o600 and len(services.key) >= 40
    services.start_gateway()
    process = psutil.Process(services.started["gateway"].process.pid)
    assert services.key not in json.dumps(process.cmdline())
    assert services.key not in services.started["gateway"].log.read_text()
