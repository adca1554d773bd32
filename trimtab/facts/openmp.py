"""Limits how long idle OpenMP threads spin before they sleep.

torch's CPU operations run on OpenMP threads. A thread that waits for its next task first spins, which reacts within a
microsecond but occupies a core, then sleeps. GNU's runtime (torch's Linux builds) spins for 300,000 iterations, LLVM's
and Intel's (macOS, conda) for 200 ms. When another program uses the same cores, the spinning threads occupy the cores
that the working threads need, and a step takes several times as long. `benchmarks/cpu_wait_policy.py` measures the
trade-off; the defaults below come from its results.

The runtimes read these variables once, when torch is imported, so `import trimtab` sets them: import it before torch.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # nothing is imported for annotations: this module is loaded before Ctrl-C is handled
if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

SPIN_DEFAULTS = {"GOMP_SPINCOUNT": "3000", "KMP_BLOCKTIME": "1"}
"""Iterations for GNU's OpenMP, milliseconds for LLVM's and Intel's. Each runtime ignores the other's variable."""
USER_SETTINGS = ("OMP_WAIT_POLICY", *SPIN_DEFAULTS)
"""A user who sets one of these has chosen a wait policy; nothing is changed then."""


def limit_spinning(environment: MutableMapping[str, str] | None = None) -> bool:
    """Sets the variables unless the user chose a wait policy or torch is imported already; returns whether it did.

    Example:
        >>> variables = {"OMP_WAIT_POLICY": "ACTIVE"}
        >>> limit_spinning(variables), variables
        (False, {'OMP_WAIT_POLICY': 'ACTIVE'})
    """
    environment = os.environ if environment is None else environment
    if "torch" in sys.modules or any(name in environment for name in USER_SETTINGS):
        return False
    environment.update(SPIN_DEFAULTS)
    return True


def describe_wait_policy(environment: Mapping[str, str] | None = None) -> str:
    """Describes this process's OpenMP wait policy in one line, for `trimtab doctor`.

    Example:
        >>> describe_wait_policy({"OMP_WAIT_POLICY": "PASSIVE"})
        'OMP_WAIT_POLICY=PASSIVE, set in the environment'
    """
    environment = os.environ if environment is None else environment
    chosen = [f"{name}={environment[name]}" for name in USER_SETTINGS if name in environment]
    if not chosen:
        return "the OpenMP runtime's default, which spins for long: import trimtab before torch to limit it"
    if chosen == [f"{name}={value}" for name, value in SPIN_DEFAULTS.items()]:
        return f"idle threads spin briefly, then sleep ({', '.join(chosen)}, set by trimtab)"
    return f"{', '.join(chosen)}, set in the environment"
