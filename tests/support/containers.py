"""An image for the tests of containers, made of this machine's own programs, without a network."""

import functools
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from gspo_env.errors import SandboxUnavailableError
from gspo_env.sandbox.containers import call, has_image

IMAGE = "localhost/gspo-env-test:programs"
PROGRAM = os.environ.get("GSPO_ENV_CONTAINERS", "podman")
"""`podman` or `docker`."""
_PROGRAMS = """awk base64 bash cat chmod cp cut date dd df env false find grep head id kill ln ls
mkdir mv printf rm sed seq sh sleep sort tail tar tee test timeout touch tr true uniq wc"""


def require_image() -> str:
    """Returns the name of the image; skips the test where no container of it can be started."""
    if (reason := _missing()) is not None:
        pytest.skip(f"containers are NOT tested: {reason}")
    return IMAGE


@functools.cache
def _missing() -> str | None:
    try:
        if not has_image(PROGRAM, IMAGE):
            command = [PROGRAM, "import", "-", IMAGE]
            subprocess.run(command, input=_root(), check=True, capture_output=True)
        options = ("--rm", "--network=none", "--ulimit=nofile=1024:1024", "--ulimit=nproc=100:100")
        done = call(PROGRAM, "run", *options, IMAGE, "bash", "-c", "python3 -c 'import sqlite3'")
    except (SandboxUnavailableError, subprocess.CalledProcessError) as error:
        return str(error)
    return done.stderr.strip() if done.returncode else None


def _root() -> bytes:
    """A root file system with a few programs, Python and the libraries that they load."""
    buffer = io.BytesIO()
    programs = [path for name in _PROGRAMS.split() if (path := shutil.which(name))]
    python = os.path.realpath(sys.executable)
    modules = Path(sys.base_prefix, "lib").glob("python3*/lib-dynload/*.so")
    loaded = subprocess.run(["ldd", *programs, python, *modules], capture_output=True, text=True)
    with tarfile.open(fileobj=buffer, mode="w", dereference=True) as archive:
        paths = sorted({*programs, python, *re.findall(r"(/\S+) \(0x", loaded.stdout)})
        library = Path(os.__file__).parent
        folders = {str(above) for path in [*paths, library] for above in Path(path).parents}
        for name in sorted({*folders, "/app", "/tmp", "/usr/bin"} - {"/"}):
            entry = tarfile.TarInfo(name[1:])
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(entry)
        for path in paths:
            archive.add(path)
        archive.add(library, filter=lambda i: None if _is_left_out(i.name) else i)
        for name, target in (("usr/bin/python3", python), ("usr/bin/env", "/bin/env")):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            if name not in archive.getnames():
                archive.addfile(link)
    return buffer.getvalue()


def _is_left_out(name: str) -> bool:
    return not {"test", "site-packages", "__pycache__", "idlelib"}.isdisjoint(Path(name).parts)
