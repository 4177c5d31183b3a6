#pragma once
#include <concur/core.h>
