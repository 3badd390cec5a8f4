"""Plans under FSDP2: between the nodes that hold the same shards."""
