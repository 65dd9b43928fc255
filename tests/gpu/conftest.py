"""With a GPU, the tests of this folder run on it. Otherwise they run over Transformer Engine emulated on CPU."""

import pytest
import torch
from emulated_engine.one_test import run_emulated


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if torch.cuda.is_available():
        return None
    run_emulated(pyfuncitem)
    return True
