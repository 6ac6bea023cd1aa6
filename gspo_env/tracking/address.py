"""Tries the address of a store before anything is trained."""

from __future__ import annotations

import os
import socket
import ssl
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from gspo_env.errors import ConfigError
from gspo_env.redaction import redact_text

_TIMEOUT = 5.0
"""Seconds that a server has to answer."""
_DATABASES = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}
"""The port of each database, if the address has none."""
_CLOUD = ("databricks", "databricks-uc", "uc")


def check_address(uri: str, setting: str) -> None:
    """Tries an address of MLflow.

    Args:
        uri: The address; empty is `mlflow.db` in the working folder.
        setting: The name of the setting, for messages.

    Raises:
        ConfigError: It does not answer, cannot be written, or is of no kind that MLflow knows.
    """
    try:
        parts = urlsplit(uri)
        scheme, host, port = parts.scheme.partition("+")[0], parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(_say(uri, setting, f"which is no address ({error})")) from error
    problem = ""
    if not uri and any(Path("mlruns").glob("[0-9]*/meta.yaml")):
        scheme = "file"
    if not uri or scheme == "sqlite":
        problem = "" if scheme == "file" else _database_problem(uri)
    elif scheme in ("http", "https"):
        problem = _server_problem(parts)
    elif scheme in _DATABASES:
        problem = _connection_problem(host, port or _DATABASES[scheme]) if host else ""
    elif scheme not in ("", "file", *_CLOUD, *_plugins()):
        kinds = ", ".join(("http", "https", "sqlite", *_DATABASES, "file", "databricks"))
        problem = f"of the kind {scheme!r}; expected one of: {kinds}"
    if scheme in ("", "file") and (uri or scheme):
        problem = _folder_problem(parts.path if scheme and uri else uri or "mlruns")
    if problem:
        raise ConfigError(_say(uri, setting, problem))


def _say(uri: str, setting: str, problem: str) -> str:
    where = f"{setting} is {redact_text(uri)!r}" if uri else "runs are tracked in ./mlflow.db"
    return (
        f"{where}, {problem}; name a store that works with --tracker.tracking-uri, or train with "
        "--tracker none"
    )


def _server_problem(parts: SplitResult) -> str:
    """Asks a tracking server for its health; any answer but a server error is one."""
    host = parts.netloc.rpartition("@")[2]
    url = f"{parts.scheme}://{host}{parts.path.rstrip('/')}/health"
    try:
        urllib.request.urlopen(url, timeout=_TIMEOUT).close()
    except urllib.error.HTTPError as error:
        return f"which answers with the error {error.code}" if error.code >= 500 else ""
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        # MLflow has settings of its own for certificates.
        return "" if isinstance(reason, ssl.SSLError) else f"which does not answer ({reason})"
    return ""


def _connection_problem(host: str, port: int) -> str:
    try:
        socket.create_connection((host, port), timeout=_TIMEOUT).close()
    except OSError as error:
        return f"which does not answer ({error})"
    return ""


def _database_problem(uri: str) -> str:
    """Tries to write beside an SQLite file, and to it."""
    name = unquote(uri.partition("///")[2].partition("?")[0]) if uri else "mlflow.db"
    if not name or name == ":memory:":
        return ""
    path = Path(name).absolute()
    try:
        if path.exists():
            path.open("r+b").close()
        if path.parent.exists():
            with tempfile.TemporaryFile(dir=path.parent):
                pass
        else:
            return f"and there is no folder {str(path.parent)!r}"
    except OSError as error:
        return f"which cannot be written ({error.strerror}: {str(path)!r})"
    return ""


def _folder_problem(name: str) -> str:
    """A store of plain files: MLflow has switched it off."""
    if os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() not in ("true", "1"):
        return (
            f"a store of plain files ({name!r}), which MLflow no longer writes unless "
            "MLFLOW_ALLOW_FILE_STORE is true"
        )
    return ""


def _plugins() -> Iterator[str]:
    """Yields the kinds of addresses that plugins of MLflow add."""
    for entry in entry_points(group="mlflow.tracking_store"):
        yield entry.name
