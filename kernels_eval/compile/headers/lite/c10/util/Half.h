#pragma once
#include <limits>
#include <concur/core.h>
#include <torch/headeronly/util/Half.h>
