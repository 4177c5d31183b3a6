"""LoRA training on a curated set, on one device or several."""
