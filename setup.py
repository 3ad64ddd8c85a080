"""Names the packages; everything else is in pyproject.toml.

`configs/` lies beside `wide_jax/` and is installed inside it, which setuptools
cannot discover by itself.
"""

import setuptools

setuptools.setup(
  packages=[
    *setuptools.find_packages(
      include=["wide_jax", "wide_jax.*", "pallas_kernels", "pallas_kernels.*"]
    ),
    "wide_jax.configs",
  ]
)
