"""Which family an op belongs to: the readable table behind the roofline model.

Names are without namespace, overload and the trailing underscore of in-place variants: ``aten::add_.Tensor`` is
``add``. A family decides which rule of :mod:`prism_plugins.costs.roofline` prices the op.
"""

from __future__ import annotations

import functools


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FAMILIES: dict[str, tuple[str, ...]] = {
    # Launches no kernel: aliases, metadata, allocation.
    "free": _words("""
        view _unsafe_view view_as reshape _reshape_alias t transpose permute expand expand_as select slice
        split split_with_sizes broadcast_to broadcast_tensors ravel adjoint unsafe_split unsafe_split_with_sizes chunk unsafe_chunk narrow squeeze unsqueeze detach
        alias as_strided unbind unfold diagonal swapaxes swapdims movedim moveaxis T mT H mH real imag view_as_real
        view_as_complex empty empty_like empty_strided empty_permuted new_empty new_empty_strided set resize resize_as
        lift lift_fresh requires_grad _version is_same_size record_stream
        flatten unflatten numel size stride storage_offset dim is_contiguous is_pinned _is_pinned data_ptr
        sym_size sym_numel sym_stride sym_storage_offset _has_same_storage_numel _nested_view_from_buffer
        retain_grad output_nr is_leaf rename refine_names align_to positive conj resolve_conj
        resolve_neg _conj _neg_view atleast_1d atleast_2d atleast_3d tensor_split hsplit vsplit dsplit _fw_primal
        _make_dual _unpack_dual values indices crow_indices col_indices
        _lazy_clone
        _fused_sdp_choice _debug_has_internal_overlap can_cast result_type promote_types
    """),
    "gemm": _words("mm addmm linear matmul _addmm_activation mv addmv dot vdot addr outer ger linear_backward"),
    "batched_gemm": _words("bmm baddbmm addbmm einsum tensordot _trilinear"),
    "scaled_gemm": _words("_scaled_mm _scaled_grouped_mm _int_mm"),
    "grouped_gemm": _words("_grouped_mm grouped_gemm gmm te_grouped_gemm"),
    "convolution": _words("""
        convolution _convolution cudnn_convolution cudnn_convolution_transpose convolution_overrideable conv1d conv2d
        conv3d conv_transpose1d conv_transpose2d conv_transpose3d slow_conv_dilated2d conv_depthwise3d
        _conv_depthwise2d thnn_conv2d _slow_conv2d_forward
    """),
    "convolution_backward": _words("convolution_backward _slow_conv2d_backward"),
    "attention_forward": _words("""
        _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention _flash_attention_forward
        _efficient_attention_forward _flash_attn_forward _flash_attn_varlen_forward flash_attn_func flash_attn_varlen_func
        _flash_attention_forward_no_dropout_inplace scaled_dot_product_attention _scaled_dot_product_attention_math
        _scaled_dot_product_flash_attention_for_cpu flash_attn_fwd fwd varlen_fwd
    """),
    "attention_backward": _words("""
        _scaled_dot_product_flash_attention_backward _scaled_dot_product_efficient_attention_backward
        _flash_attention_backward _efficient_attention_backward _flash_attn_backward _flash_attn_varlen_backward
        _scaled_dot_product_flash_attention_for_cpu_backward flash_attn_bwd bwd varlen_bwd
    """),
    "cudnn_attention_forward": _words("""
        _scaled_dot_product_cudnn_attention _cudnn_attention_forward _scaled_dot_product_fused_attention_overrideable
        fused_attn_fwd
    """),
    "cudnn_attention_backward": _words("""
        _scaled_dot_product_cudnn_attention_backward _cudnn_attention_backward
        _scaled_dot_product_fused_attention_overrideable_backward fused_attn_bwd
    """),
    "softmax_forward": _words("""
        special_softmax special_log_softmax
        _softmax softmax _log_softmax log_softmax _safe_softmax _masked_softmax _masked_softmax_ scaled_masked_softmax_forward
        scaled_upper_triang_masked_softmax_forward scaled_softmax_forward
        scaled_aligned_causal_masked_softmax_forward
    """),
    "softmax_backward": _words("""
        _softmax_backward_data _log_softmax_backward_data _masked_softmax_backward softmax_backward_data
        scaled_masked_softmax_backward scaled_upper_triang_masked_softmax_backward scaled_softmax_backward
        scaled_aligned_causal_masked_softmax_backward
    """),
    "norm_forward": _words("""
        native_layer_norm layer_norm _fused_rms_norm rms_norm native_group_norm group_norm native_batch_norm
        cudnn_batch_norm _native_batch_norm_legit _batch_norm_with_update batch_norm _weight_norm_interface
        instance_norm local_response_norm _native_batch_norm_legit_functional
    """),
    "norm_backward": _words("""
        native_layer_norm_backward _fused_rms_norm_backward native_group_norm_backward native_batch_norm_backward
        cudnn_batch_norm_backward batch_norm_backward _weight_norm_interface_backward
    """),
    "copy": _words("""
        copy clone contiguous _to_copy to lift_fresh_copy _copy_from _copy_from_and_resize view_copy permute_copy
        transpose_copy t_copy expand_copy slice_copy select_copy as_strided_copy unsqueeze_copy squeeze_copy
        alias_copy detach_copy split_copy split_with_sizes_copy unbind_copy diagonal_copy unfold_copy
        narrow_copy slice_scatter select_scatter as_strided_scatter diagonal_scatter flip fliplr
        flipud roll rot90 repeat tile repeat_interleave _pin_memory pin_memory constant_pad_nd pad reflection_pad1d
        reflection_pad2d replication_pad1d replication_pad2d tril triu block_diag im2col col2im
        slice_backward select_backward diagonal_backward unfold_backward as_strided_backward
        value_selecting_reduction_backward trace_backward float half bfloat16 double int long bool type_as
        pixel_shuffle pixel_unshuffle channel_shuffle reflection_pad2d_backward replication_pad2d_backward diag diag_embed kron masked_scatter_backward repeat_backward cast masked_select_backward
        replication_pad1d_backward reflection_pad1d_backward constant_pad_nd_backward
    """),
    "cat": _words("cat concat concatenate stack hstack vstack dstack column_stack _cat"),
    "fill": _words("""
        fill zero zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full arange range linspace
        logspace eye scalar_tensor tril_indices triu_indices _efficientzerotensor fill_diagonal hann_window
        hamming_window kaiser_window bartlett_window blackman_window
    """),
    "random": _words("""
        normal uniform random randint randint_like randn randn_like rand rand_like randperm bernoulli exponential
        cauchy geometric log_normal trunc_normal multinomial poisson _sample_dirichlet _standard_gamma
        binomial
    """),
    "dropout": _words("""
        native_dropout dropout _fused_dropout native_dropout_backward _masked_scale alpha_dropout feature_dropout
        rrelu_with_noise
    """),
    "reduction": _words("""
        sum nansum mean prod max min amax amin aminmax _aminmax argmax argmin all any norm linalg_vector_norm
        linalg_norm linalg_matrix_norm var std var_mean std_mean logsumexp count_nonzero median nanmedian mode
        nanmean dist equal _is_all_true _is_any_true trace renorm _weight_norm cosine_similarity
        linalg__powsum nuclear_norm frobenius_norm norm_except_dim quantile nanquantile cov corrcoef
        special_logsumexp hash_tensor pairwise_distance allclose
    """),
    "scan": _words("cumsum cumprod cummax cummin logcumsumexp _cummax_helper _cummin_helper cumulative_trapezoid diff"),
    "gather": _words("""
        embedding index index_select gather take take_along_dim _unsafe_index masked_select embedding_renorm
        _embedding_bag _embedding_bag_forward_only embedding_bag _unsafe_masked_index one_hot upsample_nearest2d
        upsample_bilinear2d grid_sampler_2d moe_permute permute_with_mask_map
    """),
    "scatter": _words("""
        scatter scatter_add scatter_reduce index_add index_copy index_fill index_put _index_put_impl
        _unsafe_index_put index_reduce masked_scatter put embedding_dense_backward embedding_backward
        embedding_sparse_backward _embedding_bag_dense_backward index_select_backward gather_backward take_backward
        _unsafe_masked_index_put_accumulate moe_unpermute
    """),
    "sort": _words("""
        sort argsort topk kthvalue msort unique _unique _unique2 unique_dim unique_consecutive nonzero nonzero_static
        argwhere searchsorted bucketize histc bincount histogram isin
    """),
    "loss": _words("""
        nll_loss_forward nll_loss2d_forward nll_loss_backward nll_loss2d_backward nll_loss nll_loss2d cross_entropy_loss
        nll_loss_nd
    """),
    # Transformer Engine's kernels beyond those that are like one of torch's (SAME_KERNEL).
    "quantize": _words("""
        quantize compute_amax compute_scale_from_amax amax_and_scale_update bgrad_quantize bias_grad fp8_transpose
        swap_first_dims swizzle_scales userbuffers_copy fp8_block_scaling_compute_partial_amax
        fp8_block_scaling_partial_cast mxfp8_scaling_compute_partial_amax mxfp8_scaling_partial_cast
        fused_multi_row_padding fused_multi_row_unpadding
    """),
    "activation": _words("""
        qgelu srelu geglu qgeglu reglu sreglu clamped_swiglu dgelu dqgelu drelu dsrelu dsilu dgeglu dqgeglu dreglu
        dsreglu dswiglu dglu clamped_dswiglu dbias_dgelu dbias_dqgelu dbias_drelu dbias_dsrelu dbias_dsilu te_swiglu
        te_glu fused_qkv_rope_forward fused_qkv_rope_backward dropout_fwd dropout_bwd
    """),
    "routing": _words("""
        fused_topk_with_score_function_fwd fused_topk_with_score_function_bwd fused_score_for_moe_aux_loss_fwd
        fused_score_for_moe_aux_loss_bwd fused_moe_aux_loss_fwd fused_moe_aux_loss_bwd
        row_id_map_pass_1_kernel row_id_map_pass_2_kernel row_id_map_pass_3_kernel permute_kernel unpermute_kernel
        unpermute_bwd_with_merging_probs_kernel make_chunk_sort_map_kernel sort_chunks_by_map_kernel
        online_softmax_kernel cross_entropy_kernel element_mul_kernel zero_pad_kernel
    """),
    "packed_sequences": _words("""
        thd_read_half_tensor thd_read_second_half_lse thd_second_half_lse_correction thd_out_correction
        thd_grad_correction thd_get_partitioned_indices convert_thd_to_bshd convert_bshd_to_thd fa_prepare_fwd
        fa_prepare_bwd
    """),
    "foreach": (),  # every name that begins with _foreach_
    "fused_optimizer": _words("""
        _fused_adam _fused_adamw _fused_sgd _fused_adagrad multi_tensor_adam multi_tensor_adam_capturable
        multi_tensor_adam_capturable_master multi_tensor_adam_param_remainder
        multi_tensor_adam_fp8 multi_tensor_sgd multi_tensor_lamb multi_tensor_lion
    """),
    "multi_tensor": _words("""
        _amp_foreach_non_finite_check_and_unscale _amp_update_scale multi_tensor_l2norm multi_tensor_scale
        multi_tensor_unscale_l2norm multi_tensor_axpby multi_tensor_compute_scale_and_scale_inv
        multi_tensor_compute_scale_inv_e8m0 multi_tensor_scale_tensor
        _chunk_cat split_with_sizes_copy_list
    """),
    "sync": _words("_local_scalar_dense item is_nonzero _assert_async _assert_scalar _functional_assert_async"),
    "linalg": _words("""
        linalg_inv_ex linalg_cholesky_ex cholesky linalg_qr linalg_solve_ex linalg_lu_factor_ex linalg_eigh _linalg_eigh
        _linalg_svd linalg_svd _linalg_slogdet _linalg_det inverse triangular_solve linalg_solve_triangular
        linalg_householder_product cholesky_inverse cholesky_solve _linalg_solve_ex linalg_matrix_exp
    """),
    "fft": _words("_fft_r2c _fft_c2r _fft_c2c"),
    # Pointwise: bytes decide, whatever the arithmetic.
    "elementwise": _words("""
        abs absolute acos acosh add addcdiv addcmul and angle arccos arccosh arcsin arcsinh arctan arctanh arctan2 asin
        asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor
        ceil celu clamp clamp_max clamp_min clip copysign cos cosh deg2rad digamma div divide elu eq erf erfc erfinv
        exp exp2 expm1 fix float_power floor floor_divide fmax fmin fmod frac frexp gcd ge gelu glu greater
        greater_equal gt hardshrink hardsigmoid hardswish hardtanh heaviside hypot i0 igamma igammac isclose
        isfinite isinf isnan isneginf isposinf isreal lcm ldexp le leaky_relu lerp less less_equal lgamma log log10
        log1p log2 log_sigmoid log_sigmoid_forward logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit lshift lt
        masked_fill maximum minimum mish mul multiply mvlgamma nan_to_num ne neg negative nextafter not_equal or
        polar polygamma pow prelu _prelu_kernel rad2deg reciprocal relu relu6 remainder round rshift rsqrt rsub
        selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink softsign special_bessel_j0 special_bessel_j1
        special_entr special_erfcx special_i0e special_i1 special_i1e special_log_ndtr special_ndtri special_xlog1py
        special_zeta sqrt square sub subtract swish tan tanh threshold true_divide trunc where xlogy xor complex
        _add_relu _conj_physical conj_physical
        gelu_backward silu_backward sigmoid_backward tanh_backward threshold_backward hardtanh_backward
        hardswish_backward hardsigmoid_backward leaky_relu_backward elu_backward softplus_backward
        softshrink_backward hardshrink_backward log_sigmoid_backward logit_backward mish_backward glu_backward
        _prelu_kernel_backward prelu_backward relu_backward masked_fill_backward where_backward clamp_backward
        mse_loss mse_loss_backward l1_loss smooth_l1_loss smooth_l1_loss_backward huber_loss huber_loss_backward
        binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits soft_margin_loss kl_div
        soft_margin_loss_backward fake_quantize_per_tensor_affine_cachemask quantize_per_tensor dequantize fused_moving_avg_obs_fake_quant
        rrelu rrelu_with_noise_backward cross linalg_cross modf linalg_vecdot glu_jvp glu_backward_jvp mathremainder
        rotary_forward rotary_backward fused_rope_forward fused_rope_backward bias_gelu swiglu swiglu_backward
        max_pool2d_with_indices avg_pool2d adaptive_avg_pool2d _adaptive_avg_pool2d max_pool2d_with_indices_backward
        avg_pool2d_backward _adaptive_avg_pool2d_backward avg_pool1d avg_pool3d avg_pool3d_backward _adaptive_avg_pool3d
        _adaptive_avg_pool3d_backward adaptive_max_pool2d adaptive_max_pool2d_backward max_pool1d max_pool2d max_pool3d
        max_pool3d_with_indices max_pool3d_with_indices_backward upsample_nearest1d upsample_nearest1d_backward
        upsample_nearest2d_backward upsample_nearest3d upsample_nearest3d_backward upsample_linear1d
        upsample_bilinear2d_backward upsample_bicubic2d upsample_bicubic2d_backward upsample_trilinear3d
        upsample_trilinear3d_backward _upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward
        _upsample_bicubic2d_aa _upsample_bicubic2d_aa_backward _upsample_nearest_exact2d
        _upsample_nearest_exact2d_backward special_airy_ai special_bessel_y0 special_bessel_y1
        special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v
        special_chebyshev_polynomial_w special_hermite_polynomial_h special_hermite_polynomial_he
        special_laguerre_polynomial_l special_legendre_polynomial_p special_modified_bessel_i0
        special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1
        special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1
        special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
        special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w special_spherical_bessel_j0
        special_digamma special_erf special_erfc special_erfinv special_exp2 special_expit special_expm1
        special_gammaincc special_gammainc special_gammaln special_i0 special_log1p special_log_softmax_pointwise
        special_logit special_multigammaln special_ndtr special_polygamma special_psi special_round special_sinc
        special_xlogy
    """),
}  # fmt: skip


@functools.cache
def family_of(op: str) -> str | None:
    """The family of a qualified op name, or None when no rule knows it."""
    name = base_name(op)
    if name.startswith("_foreach_"):
        return "foreach"
    return _FAMILY.get(name)


SAME_KERNEL = {
    "te::gemm": "mm",
    "apex::wgrad_gemm_accum": "mm",
    "te::fp8_gemm": "_scaled_mm",
    "te::grouped_gemm": "te_grouped_gemm",
    "te::fp8_grouped_gemm": "te_grouped_gemm",
    "apex::layer_norm_fwd": "native_layer_norm",
    "apex::layer_norm_bwd": "native_layer_norm_backward",
    "te::layernorm_fwd": "native_layer_norm",
    "te::layernorm_bwd": "native_layer_norm_backward",
    "te::rmsnorm_fwd": "_fused_rms_norm",
    "te::rmsnorm_bwd": "_fused_rms_norm_backward",
    "te::rmsnorm_bwd_add": "_fused_rms_norm_backward",
    "te::fused_attn_fwd": "_scaled_dot_product_cudnn_attention",
    "te::fused_attn_bwd": "_scaled_dot_product_cudnn_attention_backward",
    "flash_attn::fwd": "_scaled_dot_product_flash_attention",
    "flash_attn::bwd": "_scaled_dot_product_flash_attention_backward",
    "te::swiglu": "te_swiglu",
    "te::glu": "te_glu",
}
"""Ops of extensions that run the kernels, with the operands, of an op known under another name."""


@functools.cache
def base_name(op: str) -> str:
    """``aten::add_.Tensor`` → ``add``; dunder names (``__and__``) lose their underscores; see :data:`SAME_KERNEL`."""
    if op in SAME_KERNEL:
        return SAME_KERNEL[op]
    name = op.rsplit("::", 1)[-1].split(".", 1)[0]
    if name.startswith("__"):
        stripped = name.strip("_")
        return stripped[1:] if stripped[:1] == "i" and stripped[1:] in _FAMILY else stripped
    return name.rstrip("_") or name


@functools.cache
def is_inplace(op: str) -> bool:
    """Whether the op writes its first argument."""
    name = op.rsplit("::", 1)[-1].split(".", 1)[0]
    return (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")


_FAMILY: dict[str, str] = {name.rstrip("_"): family for family, names in FAMILIES.items() for name in names}
