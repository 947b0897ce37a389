"""Names of other frameworks' settings, copied from their sources: what an export writes must be among them."""

from __future__ import annotations

# torchtitan 0.3.0: torchtitan/config/configs.py, and torchtitan/distributed/activation_checkpoint.py.
TITAN_CONFIG = {
    "training": (
        "local_batch_size global_batch_size seq_len max_norm steps enable_cpu_offload disable_cuda_graphs dtype "
        "mixed_precision_param mixed_precision_reduce gc_freq gc_debug"
    ),
    "parallelism": (
        "data_parallel_replicate_degree data_parallel_shard_degree fsdp_reshard_after_forward enable_fsdp_symm_mem "
        "tensor_parallel_degree enable_sequence_parallel spmd_backend pipeline_parallel_degree "
        "module_fqns_per_model_part pipeline_parallel_first_stage_less_layers "
        "pipeline_parallel_last_stage_less_layers pipeline_parallel_layers_per_stage pipeline_parallel_schedule "
        "pipeline_parallel_schedule_csv pipeline_parallel_microbatch_size context_parallel_degree "
        "context_parallel_load_balancer context_parallel_ptrr_mask_key expert_parallel_degree"
    ),
    "compile": "enable enable_async_tensor_parallel components backend",
}
TITAN_POLICIES = ("FullAC", "SelectiveAC", "MemoryBudgetAC")

# Megatron-LM, main of August 2026: megatron/training/arguments.py and the dataclasses that its arguments are made of.
# A type, the values to choose from, or None for a switch.
MEGATRON_FLAGS: dict[str, type | tuple[str, ...] | None] = {
    "--accumulate-allreduce-grads-in-fp32": None,
    "--attention-backend": ("flash", "fused", "unfused", "local", "auto"),
    "--attention-dropout": float,
    "--bf16": None,
    "--ckpt-format": ("torch", "torch_dist", "torch_dcp", "fsdp_dtensor"),
    "--context-parallel-size": int,
    "--data-parallel-sharding-strategy": ("no_shard", "optim", "optim_grads", "optim_grads_params"),
    "--ddp-bucket-size": int,
    "--expert-model-parallel-size": int,
    "--expert-tensor-parallel-size": int,
    "--fp16": None,
    "--fp4-format": ("e2m1",),
    "--fp4-recipe": ("nvfp4", "custom"),
    "--fp8-format": ("e4m3", "hybrid"),
    "--fp8-recipe": ("tensorwise", "delayed", "mxfp8", "blockwise", "custom"),
    "--global-batch-size": int,
    "--grad-reduce-in-bf16": None,
    "--hidden-dropout": float,
    "--micro-batch-size": int,
    "--num-distributed-optimizer-instances": int,
    "--num-layers-per-virtual-pipeline-stage": int,
    "--optimizer": ("adam", "sgd", "muon", "dist_muon", "lion", "soap", "adaptive_muon"),
    "--optimizer-cpu-offload": None,
    "--optimizer-offload-fraction": float,
    "--overlap-grad-reduce": None,
    "--overlap-param-gather": None,
    "--pipeline-model-parallel-layout": str,
    "--pipeline-model-parallel-size": int,
    "--recompute-granularity": ("full", "selective"),
    "--recompute-method": ("uniform", "block"),
    "--recompute-num-layers": int,
    "--seq-length": int,
    "--sequence-parallel": None,
    "--sgd-momentum": float,
    "--tensor-model-parallel-size": int,
    "--use-distributed-optimizer": None,
    "--use-megatron-fsdp": None,
    "--use-precision-aware-optimizer": None,
    "--use-tp-pp-dp-mapping": None,
}
