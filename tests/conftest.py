"""Tests run on eight virtual CPU devices, so that every sharding is exercised without an accelerator."""

import os

os.environ["JAX_PLATFORMS"] = os.environ.get("RPG_TEST_PLATFORM", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
