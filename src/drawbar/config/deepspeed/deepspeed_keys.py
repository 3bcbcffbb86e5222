"""The keys of a DeepSpeed JSON (DeepSpeed 0.19.8), and how drawbar treats each."""

ZERO_SECTION = "zero_optimization"
NUMBER, FLAG, TEXT, SECTION, LIST = "a number", "true or false", "text", "an object", "a list"

OFFLOAD_PARAMETERS = {
    "device": TEXT,
    "nvme_path": TEXT,
    "buffer_count": NUMBER,
    "buffer_size": NUMBER,
    "max_in_cpu": NUMBER,
    "pin_memory": FLAG,
}
OFFLOAD_OPTIMIZER = {
    "device": TEXT,
    "nvme_path": TEXT,
    "buffer_count": NUMBER,
    "pin_memory": FLAG,
    "pipeline_read": FLAG,
    "pipeline_write": FLAG,
    "fast_init": FLAG,
    "ratio": NUMBER,
    "super_offload": FLAG,
    "cpuadam_cores_perc": NUMBER,
}
ZERO = {
    "stage": NUMBER,
    "contiguous_gradients": FLAG,
    "reduce_scatter": FLAG,
    "reduce_bucket_size": NUMBER,
    "use_multi_rank_bucket_allreduce": FLAG,
    "allgather_partitions": FLAG,
    "allgather_bucket_size": NUMBER,
    "overlap_comm": FLAG,
    "compute_grad_norm": FLAG,
    "load_from_fp32_weights": FLAG,
    "elastic_checkpoint": FLAG,
    "offload_param": SECTION,
    "offload_optimizer": SECTION,
    "zenflow": SECTION,
    "sub_group_size": NUMBER,
    "ignore_unused_parameters": FLAG,
    "legacy_stage1": FLAG,
    "round_robin_gradients": FLAG,
    "parameter_alignment": FLAG,
    "zero_hpz_partition_size": NUMBER,
    "zero_quantized_weights": FLAG,
    "zero_quantized_nontrainable_weights": FLAG,
    "zero_quantized_gradients": FLAG,
    "memory_efficient_linear": FLAG,
    "pipeline_loading_checkpoint": FLAG,
    "override_module_apply": FLAG,
    "log_trace_cache_warnings": FLAG,
    "enable_sanity_checks": FLAG,
    "save_muon_momentum_buffer_in_memory": FLAG,
    "leaf_module": SECTION,
    "stage3_prefetch_bucket_size": NUMBER,
    "stage3_param_persistence_threshold": NUMBER,
    "stage3_model_persistence_threshold": NUMBER,
    "stage3_max_live_parameters": NUMBER,
    "stage3_max_reuse_distance": NUMBER,
    "stage3_gather_16bit_weights_on_model_save": FLAG,
    "stage3_module_granularity_threshold": NUMBER,
    "stage3_use_all_reduce_for_fetch_params": FLAG,
    "stage3_allgather_sequential": FLAG,
}
BF16 = {
    "enabled": FLAG,
    "immediate_grad_update": FLAG,
    "check_grad_overflow": FLAG,
    "bf16_master_weights_and_grads": FLAG,
    "bf16_optimizer_states": FLAG,
}
FP16 = {
    "enabled": FLAG,
    "auto_cast": FLAG,
    "loss_scale": NUMBER,
    "initial_scale_power": NUMBER,
    "loss_scale_window": NUMBER,
    "hysteresis": NUMBER,
    "consecutive_hysteresis": FLAG,
    "min_loss_scale": NUMBER,
    "fp16_master_weights_and_grads": FLAG,
}
TENSOR_PARALLEL = {
    "dtype": TEXT,
    "autotp_size": NUMBER,
    "tp_overlap_comm": FLAG,
    "vocab_parallel_lm_head": FLAG,
    "vocab_parallel_ce_backend": TEXT,
    "tp": SECTION,
    "injection_policy_tuple": LIST,
    "partition_config": SECTION,
    "preset_model": TEXT,
    "keep_module_on_host": FLAG,
    "kernel_inject": FLAG,
}
OPTIMIZER = {"type": TEXT, "params": SECTION, "legacy_fusion": FLAG}
OPTIMIZER_PARAMS = {
    "lr": NUMBER,
    "betas": LIST,
    "eps": NUMBER,
    "weight_decay": NUMBER,
    "momentum": NUMBER,
    "max_grad_norm": NUMBER,
    "torch_adam": FLAG,
    "adam_w_mode": FLAG,
    "bias_correction": FLAG,
    "amsgrad": FLAG,
    "fused": FLAG,
    "foreach": FLAG,
    "nesterov": FLAG,
    "dampening": NUMBER,
}
SCHEDULER = {"type": TEXT, "params": SECTION}
SCHEDULER_PARAMS = {
    "warmup_min_lr": NUMBER,
    "warmup_max_lr": NUMBER,
    "warmup_num_steps": NUMBER,
    "warmup_type": TEXT,
    "warmup_min_ratio": NUMBER,
    "cos_min_ratio": NUMBER,
    "total_num_steps": NUMBER,
    "last_batch_iteration": NUMBER,
}
SECTIONS: dict[str, dict[str, str]] = {
    ZERO_SECTION: ZERO,
    f"{ZERO_SECTION}.offload_optimizer": OFFLOAD_OPTIMIZER,
    f"{ZERO_SECTION}.offload_param": OFFLOAD_PARAMETERS,
    "bf16": BF16,
    "fp16": FP16,
    "tensor_parallel": TENSOR_PARALLEL,
    "optimizer": OPTIMIZER,
    "optimizer.params": OPTIMIZER_PARAMS,
    "scheduler": SCHEDULER,
    "scheduler.params": SCHEDULER_PARAMS,
}
"""The sections whose keys are known here; DeepSpeed itself checks the keys of the other sections."""

ACCEPTED = {
    "train_batch_size": NUMBER,
    "train_micro_batch_size_per_gpu": NUMBER,
    "gradient_accumulation_steps": NUMBER,
    "gradient_clipping": NUMBER,
    "bf16": SECTION,
    "fp16": SECTION,
    ZERO_SECTION: SECTION,
    "optimizer": SECTION,
    "scheduler": SECTION,
    "tensor_parallel": SECTION,
    "zero_allow_untested_optimizer": FLAG,
    "zero_force_ds_cpu_optimizer": FLAG,
    "steps_per_print": NUMBER,
    "prescale_gradients": FLAG,
    "gradient_predivide_factor": NUMBER,
    "gradient_allreduce_op": TEXT,
    "communication_data_type": TEXT,
    "seq_parallel_communication_data_type": TEXT,
    "data_types": SECTION,
    "disable_allgather": FLAG,
    "dump_state": FLAG,
    "disable_python_gc": FLAG,
    "vocabulary_size": NUMBER,
    "wall_clock_breakdown": FLAG,
    "memory_breakdown": FLAG,
    "log_level": TEXT,
    "timers": SECTION,
    "aio": SECTION,
    "comms_logger": SECTION,
    "flops_profiler": SECTION,
    "tensorboard": SECTION,
    "wandb": SECTION,
    "csv_monitor": SECTION,
    "comet": SECTION,
    "use_data_before_expert_parallelism": FLAG,
}
"""Top-level keys that DeepSpeed gets, with the type of each; ``optimizer`` and ``scheduler`` are only compared with the
run's own settings, and not passed on."""
LOGGERS = {
    "tensorboard": "tracking.tensorboard writes the run's metrics under every strategy",
    "wandb": "tracking.trackers.wandb tracks the run under every strategy",
    "csv_monitor": "metrics.jsonl in the run directory holds the run's metrics",
    "comet": "metrics.jsonl in the run directory holds the run's metrics",
}
"""Keys of ``ACCEPTED`` that only make DeepSpeed log: passed on, with a note of what drawbar has."""
IGNORED = {
    "activation_checkpointing": "parallel.activation_checkpointing says what is computed again",
    "pipeline": "parallel.pipeline and parallel.cuts say how the model is cut into stages",
    "checkpoint": "checkpoints are drawbar's own, of one format for every strategy; see checkpoint.*",
    "checkpoint_writer": "checkpoints are drawbar's own, of one format for every strategy; see checkpoint.*",
    "datastates_ckpt": "checkpoints are drawbar's own, of one format for every strategy; see checkpoint.*",
    "nebula": "checkpoints are drawbar's own, of one format for every strategy; see checkpoint.*",
    "dataloader_drop_last": "batches are drawbar's own; see data.*",
}
"""Keys without effect here, each with what decides instead."""
GRADIENTS_OF_EMBEDDINGS = "DeepSpeed has removed it; gradients of embeddings are dense"
REFUSED = {
    "elasticity": ("the batch would change with the number of processes", "set train.global_batch"),
    "autotuning": ("it would try out other batches and ZeRO stages", "set train.micro_batch=auto"),
    "curriculum_learning": ("it would cut the samples that data.* describes", "set data.sequence_length"),
    "data_efficiency": ("it would choose and cut the samples that data.* describes", "set data.*"),
    "progressive_layer_drop": ("it would leave out layers, and DeepSpeed has removed it", ""),
    "compression_training": ("it would train another model, and DeepSpeed has removed it", ""),
    "quantize_training": ("it would train another model, and DeepSpeed has removed it", ""),
    "eigenvalue": ("it belongs to quantize_training, which DeepSpeed has removed", ""),
    "weight_quantization": ("it would change the weights", ""),
    "amp": ("DeepSpeed has removed NVIDIA's amp", "set precision=bf16 or fp16"),
    "torch_autocast": ("the dtype is the run's own", "set precision=bf16 or fp16"),
    "sparse_attention": ("DeepSpeed has removed it", "set task.attention"),
    "sparse_gradients": (GRADIENTS_OF_EMBEDDINGS, ""),
    "graph_harvesting": ("DeepSpeed has removed it", "set parallel.compile=true"),
    "compile": ("blocks are compiled by torch.compile, in the same way for every strategy", "set parallel.compile"),
    "hybrid_engine": ("the model that writes texts is the one that is trained", "see task.generation"),
    "expert_parallel": ("drawbar has no expert parallelism", "set parallel.tensor, or strategy=fsdp"),
    "sequence_parallel_size": ("sequences are cut by parallel.context alone", "set parallel.context"),
    "data_parallel_size": ("it follows from the processes and parallel.*", "set parallel.tensor or launch.nproc"),
    "managed_gradient_accumulation": ("the engine says when a batch is complete", "set train.micro_batch"),
    f"{ZERO_SECTION}.zenflow": ("it would update with gradients of earlier steps", "set offload_optimizer instead"),
    f"{ZERO_SECTION}.legacy_stage1": ("DeepSpeed has removed it", ""),
    f"{ZERO_SECTION}.mics_shard_size": ("DeepSpeed has removed it", "set parallel.strategy=fsdp replicate=N"),
    f"{ZERO_SECTION}.mics_hierarchical_params_gather": ("DeepSpeed has removed it", ""),
    f"{ZERO_SECTION}.zeropp_loco_param": ("DeepSpeed has removed it", ""),
    f"{ZERO_SECTION}.offload_optimizer.super_offload": ("it is DeepSpeed's own optimizer", "set optim.name"),
    "bf16.bf16_master_weights_and_grads": ("trained weights are fp32 in every run", ""),
    "bf16.bf16_optimizer_states": ("the optimizer's state is fp32 in every run of DeepSpeed's", ""),
    "fp16.fp16_master_weights_and_grads": ("trained weights are fp32 in every run", ""),
    "tensor_parallel.vocab_parallel_lm_head": ("only DeepSpeed's own loss takes logits of a cut vocabulary", ""),
    "optimizer.params.amsgrad": ("adamw here is without it", ""),
    "optimizer.params.nesterov": ("sgd here is without it", ""),
    "optimizer.params.dampening": ("sgd here is without it", ""),
}
"""What would change the run behind the configuration's back: the reason, and what to do. Values that say that
it is off (False, 0, 1, -1, "auto", ``{"enabled": false}``) are left out."""
CHANGES_LOSSES = {
    f"{ZERO_SECTION}.zero_quantized_weights": "parameters are rounded on their way between ranks",
    f"{ZERO_SECTION}.zero_quantized_nontrainable_weights": "frozen parameters are rounded",
    f"{ZERO_SECTION}.zero_quantized_gradients": "gradients are rounded on their way between ranks",
    "communication_data_type": "gradients are summed over ranks in this format",
    "data_types": "gradients are added up in the formats that it names",
}
"""Allowed, with a warning: keys that make losses differ from those of the other strategies."""
RENAMED = {
    "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    "prefetch_bucket_size": "stage3_prefetch_bucket_size",
    "param_persistence_threshold": "stage3_param_persistence_threshold",
    "model_persistence_threshold": "stage3_model_persistence_threshold",
    "max_live_parameters": "stage3_max_live_parameters",
    "max_reuse_distance": "stage3_max_reuse_distance",
    "gather_16bit_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    "module_granularity_threshold": "stage3_module_granularity_threshold",
    "use_all_reduce_for_fetch_params": "stage3_use_all_reduce_for_fetch_params",
    "allgather_sequential": "stage3_allgather_sequential",
}
"""Older names, and names without the prefix ``stage3_``, in ``zero_optimization``."""
LEGACY_OFFLOAD = {
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_param",
    "cpu_offload_params": "offload_param",
}
PIN_MEMORY = "cpu_offload_use_pin_memory"
LEGACY_FLAGS = ("cpu_offload", "cpu_offload_param", "cpu_offload_params", PIN_MEMORY)
TOP: dict[str, str | None] = {
    **ACCEPTED,
    **dict.fromkeys(IGNORED),
    **dict.fromkeys(key for key in REFUSED if "." not in key),
}
"""Every key of the top level that is known."""
