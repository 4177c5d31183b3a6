"""What every figure must be: readable on white and on black, described, with nothing behind it."""

import numpy as np

from tasks.reporting.charts import save

LUMINANCE = (0.2126, 0.7152, 0.0722)


def linear(rgb):
    """Linear light of sRGB values (0 to 1)."""
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def assert_readable(drawn, directory):
    from matplotlib.image import imread

    vector, raster = save(drawn, directory)
    assert "<dc:description>" in vector.read_text(encoding="utf-8") and len(drawn.alt) > 60
    pixels = imread(raster)
    assert pixels[0, 0, 3] == 0  # nothing behind it
    light = linear(pixels[pixels[..., 3] > 0.95][:, :3]) @ LUMINANCE + 0.05
    # WCAG contrast against both grounds: 3 : 1 is asked of graphics
    assert 1.05 / light.max() > 3 and light.min() / (0.0056 + 0.05) > 3
