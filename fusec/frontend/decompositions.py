"""The ATen operations that torch decomposes before the import, and those that stay whole."""

from functools import cache
from typing import Any

import torch

from fusec.frontend.draws import decompositions_of_draws
from fusec.frontend.packed_matmuls import decompositions_of_packed_matmuls
from fusec.frontend.predictions import laid_out
from fusec.frontend.searches import decompositions_of_searches
from fusec.frontend.selections import decompositions_of_selections
from fusec.frontend.torch_internals import decomposition_table

_aten = torch.ops.aten

KEPT_WHOLE = (
    _aten.linear.default,
    _aten.matmul.default,
    _aten.scaled_dot_product_attention.default,
)
"""Composite operations that the importer models, kept whole at inference where no gradient is computed."""

_NAMES = """
_softmax _softmax_backward_data _log_softmax _log_softmax_backward_data _safe_softmax logsumexp
native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward native_group_norm
native_group_norm_backward native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training
gelu gelu_backward silu silu_backward leaky_relu leaky_relu_backward elu elu_backward celu mish mish_backward
softplus softplus_backward hardtanh hardtanh_backward hardswish hardswish_backward hardsigmoid hardsigmoid_backward
relu6 log_sigmoid_forward log_sigmoid_backward threshold threshold_backward glu glu_backward prelu
tanh_backward sigmoid_backward native_dropout_backward
mse_loss mse_loss_backward nll_loss_forward nll_loss_backward smooth_l1_loss smooth_l1_loss_backward huber_loss
huber_loss_backward binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits
isin nansum lerp xlogy hypot logit logaddexp nan_to_num sinc deg2rad frac
_weight_norm_interface linalg_vector_norm norm dist aminmax count_nonzero
zero zero_ fill eye linspace
""".split()


def decompositions() -> dict[Any, Any]:
    """Return all decompositions: torch's own, and ours of operations that torch keeps whole."""
    ours = (
        decompositions_of_packed_matmuls()
        | decompositions_of_selections()
        | decompositions_of_draws()
        | decompositions_of_searches()
    )
    return _decompositions() | ours


@cache
def _decompositions() -> dict[Any, Any]:
    """Torch's own decompositions of the chosen operations; half types compute in f32 and round once, as in eager."""
    packets = [getattr(_aten, name) for name in _NAMES if hasattr(_aten, name)]
    return {operation: laid_out(operation, d) for operation, d in decomposition_table(packets).items()}
