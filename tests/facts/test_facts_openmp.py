"""Idle threads of torch's OpenMP runtime spin briefly, unless the user has set a wait policy."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from trimtab.facts.openmp import SPIN_DEFAULTS, USER_SETTINGS, describe_wait_policy, limit_spinning

SHOW = f"import os; print(sorted(n for n in os.environ if n in {USER_SETTINGS!r}))"


def in_python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in USER_SETTINGS}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=True,
    )


@pytest.mark.skipif(sys.platform != "linux", reason="torch's Linux builds carry GNU's OpenMP")
def test_the_runtime_inside_torch_reads_the_limit() -> None:
    """The runtime itself prints what it uses, so this fails when the variable is set too late or misspelt."""
    limited = in_python("import trimtab, torch", OMP_DISPLAY_ENV="verbose").stderr
    if "GOMP_SPINCOUNT" not in limited:
        pytest.skip("this torch uses another OpenMP runtime than GNU's")
    assert f"GOMP_SPINCOUNT = '{SPIN_DEFAULTS['GOMP_SPINCOUNT']}'" in limited


def test_the_command_line_limits_spinning_before_torch_is_imported() -> None:
    code = f"import trimtab.cli.main, sys; assert 'torch' not in sys.modules; {SHOW}"
    assert in_python(code).stdout.strip() == str(sorted(SPIN_DEFAULTS))


@pytest.mark.parametrize("name", USER_SETTINGS)
def test_a_wait_policy_of_the_user_is_kept(name: str) -> None:
    assert in_python(f"import trimtab; {SHOW}", **{name: "1"}).stdout.strip() == str([name])


def test_nothing_is_set_once_torch_is_imported() -> None:
    """The variables would have no effect in this process, but `doctor` would report them as the wait policy."""
    assert "torch" in sys.modules or __import__("torch")
    variables: dict[str, str] = {}
    assert not limit_spinning(variables)
    assert variables == {}
    assert "import trimtab before torch" in describe_wait_policy(variables)


def test_doctor_reports_who_set_the_policy() -> None:
    assert "set by trimtab" in describe_wait_policy(dict(SPIN_DEFAULTS))
    assert "set in the environment" in describe_wait_policy({"GOMP_SPINCOUNT": "7"})
