"""The judge: a float64 reference over the same quantized bytes, and the comparisons. Nothing here imports the
kernel side (layout, config, compile, backends), so a bug there cannot excuse itself here."""
