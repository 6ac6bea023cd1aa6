"""Models that the tests of the learner share."""

import pytest
from support import architectures


@pytest.fixture
def mixture():
    """A small mixture of experts with the auxiliary loss of its routers."""
    return architectures.build("Qwen3-MoE", vocab_size=200, router_aux_loss_coef=0.05)
