"""Stream profiles: what records mean, how they are normalised, and the registries they install."""
