"""Commands that are refused."""

import pytest

from gspo_env.cli.main import main


def refused(capsys, *arguments):
    """The one sentence of a command that exits with code 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    said = capsys.readouterr().err.strip()
    assert end.value.code == 2, said
    assert said.startswith("gspo-env: ")
    assert len(said.splitlines()) == 1
    return said
