"""Commands that look at the machine: `weave-moe info`, `cache` and `check`."""
