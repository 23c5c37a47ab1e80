"""Kernel names, as profilers of GPUs and CPUs show them, and the groups that they belong to; the table of them."""

from types import SimpleNamespace

import pytest
import torch

from nanosprint.training.profile import GROUPS, Kernel, by_group, group_of, kernels_of, table

NAMES = {
    "attention": (
        "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, cutlass::bfloat16_t>>",
        "void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128, 64, 128, 8, 2>>",
        "void flash::flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<128>>",
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::Mainloop>>>",
        "kernel_cutlass_kernel_flash_attncuteflash_fwdFlashAttentionForwardSm90_object_at__tensorptrbf16",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7",
        "_attend_forward_kernel",
        "_attention_dq_kernel",
        "triton_tem_fused_flex_attention_backward_zeros_3",
    ),
    "composed attention": (
        "_maps_kernel",
        "_read_kernel",
        "_dmaps_kernel",
        "_dk_kernel",
        "triton_per_fused__softmax_bitwise_and_masked_fill_mul_sum_12",
    ),
    "bf16 products": (
        "nvjet_tst_256x128_64x4_2x1_v_bz_coopA_TNT",
        "nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopB_NNT",
        "nvjet_tss_256x128_64x4_2x1_v_bz_coopA_NTN",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1",
        "sm90_xmma_gemm_bf16f32_bf16f32_f32_nt_n_tilesize64x128x64",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>",
        "triton_tem_fused_mm_7",
    ),
    "fp8 products": (
        "nvjet_qqtst_128x256_128x6_2x1_v_bz_coopA_TNT",
        "nvjet_sm90_qqtst_256x128_128x4_2x1_v_bz_TNT",
        "nvjet_qqsss_128x256_128x6_2x1_v_bz_coopA_TNN",
        "nvjet_rqtst_128x256_128x6_2x1_v_bz_coopA_TNT",
        "sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize64x64x128_warpgroupsize1x1x1",
        "void cutlass::device_kernel<GemmUniversal<cutlass::float_e5m2_t, cutlass::float_e4m3_t>>",
        "aten::_scaled_mm",
    ),
    "fp32 products": (
        "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize128x128x8_stage3_warpsize2x2x1_ffma",
        "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5_nn_align1>",
        "sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32",
    ),
    "matrix products": ("aten::mm", "aten::bmm", "aten::addmm"),
    "fused MLP": ("_relu2_product_kernel", "_relu2_resident_kernel", "_relu2_pass_kernel"),
    "softmax and loss": (
        "_softcap_xent_kernel",
        "_softcap_xent_resident_kernel",
        "triton_red_fused__log_softmax_nll_loss_forward_4",
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float>",
        "aten::_log_softmax",
    ),
    "embedding": (
        "triton_poi_fused_embedding_dense_backward_9",
        "triton_per_fused__to_copy_embedding_mean_mul_pow_rsqrt_0",
        "triton_poi_fused_index_put_new_zeros_3",
        "void at::native::indexing_backward_kernel<c10::BFloat16, 4>",
        "void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16, long, unsigned int>",
        "void at::native::vectorized_gather_kernel<16, long>",
        "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<Policy900, false, long, long>",
        "aten::embedding_dense_backward",
    ),
    "copies and transposes": (
        "Memcpy DtoD (Device -> Device)",
        "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl<at::native::direct_copy_kernel_cuda>>",
        "_quantize_kernel",
        "_quantize_e4m3_kernel",
        "_renew_kernel",
        "_turn_kernel",
        "triton_poi_fused__to_copy_3",
        "triton_poi_fused_clone_transpose_8",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<OpaqueType<2u>, unsigned int, 2, 64, 64>",
        "aten::copy_",
    ),
    "fills": (
        "Memset (Device)",
        "void at::native::vectorized_elementwise_kernel<8, at::native::FillFunctor<c10::BFloat16>>",
        "triton_poi_fused_zeros_1",
        "triton_poi_fused_new_zeros_12",
        "aten::fill_",
    ),
    "optimizer": (
        "_adam_kernel",
        "_momentum_kernel",
        "_apply_kernel",
        "_product_kernel",
        "_divide_kernel",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<2>>",
    ),
    "elementwise": (
        "triton_per_fused__fused_rms_norm_add_mul_21",
        "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_tanh_5",
        "triton_poi_fused_add_clone_mul_2",
        "triton_poi_fused_sigmoid_17",
        "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>>",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float>>>",
        "aten::mul",
    ),
    "communication": ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",),
    "other": ("kernel_of_somebody_else", "autograd::engine::evaluate_function: MmBackward0"),
}


@pytest.mark.parametrize(("group", "name"), [(group, name) for group, names in NAMES.items() for name in names])
def test_group_of_a_kernel(group, name):
    assert group_of(name) == group
    assert group in GROUPS


def event(key, us, count=4, device="CUDA", annotation=False):
    kind = getattr(torch.autograd.DeviceType, device)
    return SimpleNamespace(
        key=key, count=count, device_type=kind, is_user_annotation=annotation,
        self_device_time_total=us, self_cpu_time_total=us,
    )  # fmt: skip


def test_kernels_are_counted_once_and_per_step():
    events = [
        event("_adam_kernel", 4000, count=6),
        event("aten::mm", 9000, device="CPU"),
        event("Call CompiledFxGraph", 9000, annotation=True),
        event("ProfilerStep#3", 9000),
        event("nvjet_tst_128x256", 8000),
    ]
    assert kernels_of(events, True, 4) == [Kernel("nvjet_tst_128x256", 2.0, 1), Kernel("_adam_kernel", 1.0, 1.5)]
    assert kernels_of(events[1:2], False, 2) == [Kernel("aten::mm", 4.5, 2)]


def test_table_shows_floors_idle_and_what_has_no_group():
    kernels = [Kernel("nvjet_tst_1", 6.0, 3), Kernel("nvjet_tst_2", 1.0, 1), Kernel("odd_one", 0.5, 1)]
    assert by_group(kernels) == {"bf16 products": 7.0, "other": 0.5}
    shown = table(kernels, top=1, wall_ms=10.0, floors={"bf16 products": 3.5, "fused MLP": 2.0})
    lines = {line.split("  ")[0]: line.split() for line in shown.splitlines()}
    assert lines["bf16 products"][2:] == ["7.000", "70.0%", "3.500", "2.00"]
    assert lines["idle"][1:] == ["2.500", "25.0%"]
    assert lines["fused MLP"][2:] == ["0.000", "0.0%", "2.000", "0.00"]
    assert lines["sum"][1:] == ["10.000", "100.0%", "5.500", "1.82"]
    assert "     6.000       3    2000.0  bf16 products         nvjet_tst_1" in shown
    assert "nvjet_tst_2" not in shown
    assert "odd_one" in shown
