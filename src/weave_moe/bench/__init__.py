"""Timing the layer beside others, and what such times say about a machine.

`timing` times, `cells` says of what and whether it is right, `contestants` and `rivals` say of
whom, `rates` what a GPU does at best. `weave-moe bench` and `weave-moe calibrate` are made of them,
and so are the scripts of the repository's `benchmarks/`.
"""
