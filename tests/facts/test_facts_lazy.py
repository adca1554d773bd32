from __future__ import annotations

from importlib import import_module

import pytest

from trimtab.facts.lazy import lazy_attributes


@pytest.mark.parametrize(
    ("package", "former", "current"),
    [
        ("trimtab.adapt", "keep_unpacked", "set_dequantized_copies"),
        ("trimtab.adapt", "set_masks", "create_dropout_masks"),
        ("trimtab.checkpoint", "Found", "SavedCheckpoint"),
        ("trimtab.data", "highlighted", "highlight_example"),
        ("trimtab.data", "keep_rows", "write_rows"),
        ("trimtab.data", "keep_texts", "write_texts"),
        ("trimtab.optim", "InBackward", "OptimizerInBackward"),
        ("trimtab.plan", "Longest", "MaxSeqLength"),
        ("trimtab.plan", "longest_context", "find_max_seq_length"),
    ],
)
def test_former_public_names_work_with_a_warning(package: str, former: str, current: str) -> None:
    module = import_module(package)
    with pytest.warns(FutureWarning, match=f"{package}.{former} is now called {current}"):
        found = getattr(module, former)
    assert found is getattr(module, current)


def test_an_unknown_name_is_an_attribute_error() -> None:
    find = lazy_attributes("trimtab.facts", {"format_bytes": "units"}, {"bytes": "format_bytes"})
    with pytest.raises(AttributeError, match=r"'trimtab\.facts' has no attribute 'kilobytes'"):
        find("kilobytes")
