"""Names of torch and numpy that code may have; ``modules`` says how each is given.

Left out: whatever reads or writes files, compiles, loads or registers code, shares memory, takes memory by
its address, leaves memory as it found it (those make zeros), or changes settings of the process; and sparse,
quantised and nested tensors, whose invariants torch does not check.
"""

from __future__ import annotations

from typing import Final

from nnsight_engine.sandbox.restricted.names import names_in

FUNCTIONS: Final = names_in(
    """
    abs absolute acos acosh add addbmm addcdiv addcmul addmm addmv addr adjoint all allclose amax amin
    aminmax angle any arange arccos arccosh arcsin arcsinh arctan arctan2 arctanh argmax argmin argsort
    argwhere as_tensor asin asinh atan atan2 atanh atleast_1d atleast_2d atleast_3d baddbmm bernoulli
    bincount bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor
    blackman_window block_diag bmm broadcast_tensors broadcast_to bucketize cartesian_prod cat cdist
    ceil celu chunk clamp clamp_max clamp_min clip clone column_stack combinations complex concat
    concatenate conj copysign corrcoef cos cosh cosine_similarity count_nonzero cov cross cummax cummin
    cumprod cumsum deg2rad det detach diag diag_embed diagflat diagonal diff digamma dist div divide dot
    dropout dsplit dstack einsum embedding eq equal erf erfc erfinv exp exp2 expm1 eye fix flatten flip
    fliplr flipud float_power floor floor_divide fmax fmin fmod frac full full_like gather gcd ge ger
    greater greater_equal group_norm gt hamming_window hann_window hardshrink heaviside histc hsplit
    hstack hypot imag index_add index_copy index_fill index_select inner inverse is_complex
    is_floating_point is_nonzero is_tensor isclose isfinite isin isinf isnan isneginf isposinf isreal
    kl_div kron kthvalue layer_norm lcm ldexp le lerp less less_equal lgamma linspace log log10 log1p
    log2 log_softmax logaddexp logaddexp2 logcumsumexp logdet logical_and logical_not logical_or
    logical_xor logit logspace logsumexp lt masked_fill masked_select matmul matrix_exp matrix_power max
    maximum mean median meshgrid min minimum mm mode moveaxis movedim msort mul multinomial multiply mv
    nan_to_num nanmean nanmedian nanquantile nansum narrow ne neg negative nextafter nonzero norm normal
    not_equal numel ones ones_like outer pairwise_distance permute pinverse pixel_shuffle
    pixel_unshuffle polar positive pow prod promote_types quantile rad2deg rand rand_like randint
    randint_like randn randn_like randperm ravel real reciprocal relu remainder renorm repeat_interleave
    reshape result_type rms_norm roll rot90 round rsqrt scatter scatter_add scatter_reduce searchsorted
    select selu sgn sigmoid sign signbit sin sinc sinh slogdet softmax sort split split_with_sizes sqrt
    square squeeze stack std std_mean sub subtract sum svd swapaxes swapdims t take take_along_dim tan
    tanh tensor tensor_split tensordot threshold tile topk trace transpose trapezoid trapz tril
    tril_indices triu triu_indices true_divide trunc unbind unflatten unique unique_consecutive
    unsqueeze vander var var_mean vdot view_as_complex view_as_real vsplit vstack where xlogy zeros
    zeros_like manual_seed is_grad_enabled
    """
)
EMPTY: Final = {"empty": "zeros", "empty_like": "zeros_like"}
"""Functions that leave memory as they found it, and those that are given instead."""
CONSTANTS: Final = names_in(
    """
    pi e inf nan newaxis strided contiguous_format preserve_format channels_last
    """
)
CLASSES: Final = names_in(
    """
    Size device finfo iinfo Generator no_grad enable_grad inference_mode set_grad_enabled autocast
    """
)
FUNCTIONAL: Final = names_in(
    """
    adaptive_avg_pool1d adaptive_avg_pool2d avg_pool1d avg_pool2d batch_norm bilinear
    binary_cross_entropy binary_cross_entropy_with_logits celu conv1d conv2d cosine_embedding_loss
    cosine_similarity cross_entropy dropout elu embedding gelu glu group_norm gumbel_softmax hardshrink
    hardsigmoid hardswish hardtanh hinge_embedding_loss huber_loss interpolate kl_div l1_loss layer_norm
    leaky_relu linear log_softmax logsigmoid margin_ranking_loss max_pool1d max_pool2d mish mse_loss
    nll_loss normalize one_hot pad pairwise_distance prelu relu relu6 rms_norm rrelu
    scaled_dot_product_attention selu sigmoid silu smooth_l1_loss soft_margin_loss softmax softmin
    softplus softshrink softsign tanh tanhshrink threshold triplet_margin_loss unfold
    """
)
LINALG: Final = names_in(
    """
    cholesky cond cross det diagonal eig eigh eigvals eigvalsh inv lstsq matmul matrix_exp matrix_norm
    matrix_power matrix_rank multi_dot norm pinv qr slogdet solve solve_triangular svd svdvals vecdot
    vector_norm
    """
)
FFT: Final = names_in(
    """
    fft ifft rfft irfft fft2 ifft2 fftn ifftn fftfreq rfftfreq fftshift ifftshift
    """
)
SPECIAL: Final = names_in(
    """
    digamma entr erf erfc erfinv exp2 expit expm1 gammaln log1p log_softmax logit logsumexp ndtr ndtri
    round sinc softmax  xlogy
    """
)
LAYERS: Final = names_in(
    """
    Module Identity Linear Bilinear LayerNorm RMSNorm GroupNorm BatchNorm1d Embedding Dropout Flatten
    Unflatten Sequential ModuleList ModuleDict ParameterList ParameterDict ReLU ReLU6 GELU SiLU Mish ELU
    SELU CELU GLU LeakyReLU PReLU Sigmoid Tanh Softmax LogSoftmax Softplus Softsign Hardtanh Hardswish
    Hardsigmoid Threshold CosineSimilarity PairwiseDistance MSELoss L1Loss SmoothL1Loss HuberLoss
    CrossEntropyLoss NLLLoss KLDivLoss BCELoss BCEWithLogitsLoss Conv1d Conv2d MultiheadAttention
    """
)
NUMPY_FUNCTIONS: Final = names_in(
    """
    abs absolute add all allclose amax amin any append argmax argmin argsort argwhere array asarray
    array_equal around atleast_1d atleast_2d average bincount broadcast_to ceil clip column_stack
    concatenate copy corrcoef cos cosh count_nonzero cov cross cumprod cumsum diag diagonal diff divide
    dot dstack einsum equal exp expand_dims expm1 eye flatnonzero flip floor floor_divide full full_like
    greater greater_equal histogram hstack hypot identity inner interp intersect1d isclose isfinite isin
    isinf isnan less less_equal linspace log log10 log1p log2 logical_and logical_not logical_or
    logical_xor logspace matmul max maximum mean median meshgrid min minimum mod multiply nan_to_num
    nanmax nanmean nanmin nanstd nansum ndim negative nonzero not_equal ones ones_like outer percentile
    power prod ptp quantile ravel reciprocal repeat reshape rint roll round searchsorted shape sign sin
    sinh size sort split sqrt square squeeze stack std subtract sum swapaxes take tan tanh tensordot
    tile trace transpose tril triu true_divide trunc unique unravel_index vander var vdot vstack where
    zeros zeros_like
    """
)
NUMPY_EMPTY: Final = {"empty": "zeros", "empty_like": "zeros_like"}
NUMPY_TYPES: Final = names_in(
    """
    float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool_ complex64 complex128
    dtype integer floating number generic
    """
)
NUMPY_CONSTANTS: Final = names_in(
    """
    pi e inf nan newaxis
    """
)
NUMPY_LINALG: Final = names_in(
    """
    norm inv pinv det solve svd eig eigh eigvals eigvalsh qr matrix_rank cholesky lstsq
    """
)
