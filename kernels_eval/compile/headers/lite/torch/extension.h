// <torch/extension.h> of the lite tier, without pybind11.
#pragma once
#include <torch/types.h>
#include <ATen/Parallel.h>
