"""What only the administrator may do."""

from __future__ import annotations

import pytest

from jaxpaged.errors import ConfigError
from server.config import ServerConfig

ADMIN, USER = "the-admin-key", "a-user-key"
PATHS = ("/reset_prefix_cache", "/start_profile", "/stop_profile")


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("path", PATHS)
def test_without_an_administrator_they_are_forbidden(start, path):
    server = start(profiler_dir="/nowhere")
    for headers in ({}, bearer(ADMIN)):
        response = server.http.post(path, headers=headers)
        assert response.status_code == 403 and "--admin-api-key" in response.json()["error"]["message"]
    assert server.engine.num_resets == 0 and server.engine.profile is None


@pytest.mark.parametrize("path", PATHS)
def test_a_users_key_is_not_enough(start, path):
    server = start(api_key=(USER,), admin_api_key=(ADMIN,), root_path="/api")
    assert server.http.post(path).status_code == 401
    for prefix in ("", "/api"):
        response = server.http.post(prefix + path, headers=bearer(USER))
        assert response.status_code == 403 and response.json()["error"]["type"] == "permission_error"
    assert server.http.get(path, headers=bearer(ADMIN)).status_code == 405
    assert server.engine.num_resets == 0


def test_the_administrators_key_opens_all(start):
    server = start(api_key=(USER,), admin_api_key=(ADMIN, "another"))
    assert server.http.post("/reset_prefix_cache", headers=bearer(ADMIN)).status_code == 200
    assert server.http.post("/reset_prefix_cache", headers=bearer("another")).status_code == 200
    assert server.engine.num_resets == 2
    assert server.http.get("/v1/models", headers=bearer(ADMIN)).status_code == 200


def test_without_user_keys_it_is_still_needed(start):
    server = start(admin_api_key=(ADMIN,))
    assert server.http.get("/v1/models").status_code == 200
    assert server.http.post("/reset_prefix_cache").status_code == 403
    assert server.http.post("/reset_prefix_cache", headers=bearer(ADMIN)).status_code == 200


def test_a_profile_is_started_and_stopped_once(start, tmp_path):
    server = start(admin_api_key=(ADMIN,), profiler_dir=str(tmp_path / "traces"))

    def post(path: str) -> int:
        return server.http.post(path, headers=bearer(ADMIN)).status_code

    assert post("/stop_profile") == 400
    assert post("/start_profile") == 200
    assert post("/start_profile") == 400
    assert server.post("/v1/completions", prompt="abc").status_code == 200
    assert post("/stop_profile") == 200
    assert post("/stop_profile") == 400
    assert list((tmp_path / "traces").iterdir())


def test_without_a_folder_there_is_no_profiling(start):
    server = start(admin_api_key=(ADMIN,))
    for path in ("/start_profile", "/stop_profile"):
        response = server.http.post(path, headers=bearer(ADMIN))
        assert response.status_code == 400 and "--profiler-dir" in response.json()["error"]["message"]


def test_a_folder_that_cannot_be_made_is_told(start, tmp_path):
    (tmp_path / "file").touch()
    server = start(admin_api_key=(ADMIN,), profiler_dir=str(tmp_path / "file" / "traces"))
    response = server.http.post("/start_profile", headers=bearer(ADMIN))
    assert response.status_code == 500 and "profiler_dir" in response.json()["error"]["message"]
    assert server.engine.profile is None


def test_an_empty_key_is_no_key():
    with pytest.raises(ConfigError):
        ServerConfig(admin_api_key=("",))
