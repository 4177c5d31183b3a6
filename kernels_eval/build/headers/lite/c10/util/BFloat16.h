#pragma once
#include <concur/core.h>
#include <torch/headeronly/util/BFloat16.h>
