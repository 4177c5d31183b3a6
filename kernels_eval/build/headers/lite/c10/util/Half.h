#pragma once
#include <concur/core.h>
#include <torch/headeronly/util/Half.h>
