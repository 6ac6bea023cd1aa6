"""Calls of vLLM's server interface, and what it answers."""

from __future__ import annotations

import time
from typing import Any

import httpx2 as httpx

from gspo_env.engines.base import Completion, Sampling, version_runs
from gspo_env.engines.vllm.process import Server
from gspo_env.engines.vllm.settings import EXTENSION
from gspo_env.errors import EngineError

RESET_SECONDS = 60.0
"""Maximum time until a server has reset its cache."""


def call(client: httpx.Client, method: str, **keywords: str) -> Any:
    """Calls a method in each worker of a server; returns their answers."""
    body = {"method": method, "kwargs": keywords}
    return client.post("/collective_rpc", json=body).raise_for_status().json().get("results")


def pause(client: httpx.Client) -> None:
    """Stops sampling on a server once its current step is done; keeps its requests."""
    keep = {"mode": "keep", "clear_cache": "false"}  # `reset_cache` clears it, after the update
    client.post("/pause", params=keep).raise_for_status()


def resume(client: httpx.Client) -> None:
    """Lets a paused server go on with its requests."""
    client.post("/resume").raise_for_status()


def set_version(client: httpx.Client, version: int) -> None:
    """Names the weights of a server, for `Completion.weights_versions`."""
    client.post("/update_weight_version", json={"new_version": str(version)}).raise_for_status()


def reset_cache(client: httpx.Client) -> str:
    """Resets a paused server's prefix cache; returns an error message, or an empty string.

    Requests in flight lose their keys and values too, and compute them anew when they go on.
    """
    deadline = time.monotonic() + RESET_SECONDS
    every = {"reset_running_requests": "true"}
    while not client.post("/reset_prefix_cache", params=every).raise_for_status().json()["success"]:
        if time.monotonic() > deadline:
            return f"it did not reset its prefix cache within {RESET_SECONDS:g} s"
        time.sleep(0.05)
    return ""


def check_server(client: httpx.Client, backend: str) -> str:
    """Returns the dtype of a server's weights.

    Raises:
        EngineError: The server cannot check its weights, or was started with another backend: the
            trainer would wait for it.
    """
    told = client.get("/server_info", params={"config_format": "json"}).raise_for_status().json()
    config = told["vllm_config"]
    extension = config["parallel_config"]["worker_extension_cls"]
    if extension != EXTENSION:
        raise EngineError(
            f"its worker extension is {extension!r}; expected {EXTENSION!r}, which checks the "
            f"weights: install gspo-env there and start it with --worker-extension-cls {EXTENSION}"
        )
    found = (config["weight_transfer_config"] or {}).get("backend")
    if backend not in ("folder", found):
        raise EngineError(
            f"its weight transfer backend is {found!r}; expected {backend!r}: start it with "
            f"""--weight-transfer-config '{{"backend": "{backend}"}}' or choose --transfer folder"""
        )
    return str(config["model_config"]["dtype"]).removeprefix("torch.")


def sampling_fields(sampling: Sampling) -> dict[str, Any]:
    """Returns the sampling parameters of vLLM, for an engine in this process and for a server."""
    return {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "stop_token_ids": list(sampling.stop_ids),
        "ignore_eos": True,  # only the stop ids end an action
        "seed": sampling.seed % 2**63,
        "logprobs": 0,
        "detokenize": False,
    }


def read_completion(server: Server, response: httpx.Response) -> Completion | str:
    """Reads an answer; returns why the server cannot be used any more if it gave no completion.

    Raises:
        EngineError: The server refused the request, or the answer cannot be read.
    """
    if response.status_code != 200:
        raise EngineError(
            f"vLLM server {server.name} refused a request with {response.status_code}: "
            f"{response.text[:300]}"
        )
    try:
        choice = response.json()["choices"][0]
        if choice["finish_reason"] == "abort":  # as a server does when it is stopped
            return "aborted a request"
        ids = tuple(choice["token_ids"])
        spans = [(span["version"], span["start"]) for span in choice["weight_versions"]]
        if others := [version for version, _ in spans if not version.isdecimal()]:
            return f"has the weights {others[0]!r}, which this run did not send"
        lowest, runs = version_runs([(int(version), n) for version, n in spans], len(ids))
        return Completion(
            token_ids=ids,
            logprobs=tuple(place["logprob"] for place in choice["logprobs"]["content"]),
            finish_reason=choice["finish_reason"],
            weights_version=lowest,
            weights_versions=runs,
        )
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise EngineError(
            f"vLLM server {server.name} gave an answer that cannot be read "
            f"({type(error).__name__}: {error}): {response.text[:300]}"
        ) from error
