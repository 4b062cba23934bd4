"""vLLM: its paged cache saved to and loaded from KVX's tiers. What needs vLLM itself is in connector.py and offloading.py only.

KVTransferConfig(kv_connector="KvxConnector", kv_connector_module_path="kvx.adapters.vllm.connector", kv_role="kv_both",
                 kv_connector_extra_config={"tiers": ["host:1GB", "disk:/var/kv"], "model": "smollm2", "block_size": 32})
"""
