"""What a call stands on: the registry, configs, machines, compiled code, packs, private names."""
