"""vLLM: its paged cache saved to and loaded from KVX's tiers. These files translate; kvx/connector/ does the work.

What needs vLLM itself is in connector.py and offloading.py only.

KVTransferConfig(kv_connector="KvxConnector", kv_connector_module_path="kvx.adapters.vllm.connector", kv_role="kv_both",
                 kv_connector_extra_config={"tiers": ["host:1GB", "disk:/var/kv"], "model": "smollm2", "block_size": 32})

A block may leave a tier after it was counted. vLLM ends the request with an error then; with kv_load_failure_policy="recompute" it
computes the block, but rightly only with async_scheduling=False and VLLM_USE_V2_MODEL_RUNNER=0 (vLLM 0.32): others are refused.
"""
