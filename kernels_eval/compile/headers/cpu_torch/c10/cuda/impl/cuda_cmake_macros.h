// Empty on purpose: CPU builds of torch ship the c10/cuda headers without this generated file.
#pragma once
