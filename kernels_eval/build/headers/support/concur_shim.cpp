#include <Python.h>
#include <torch/csrc/autograd/python_variable.h>
#include "concur_shim.h"

PyObject* concur_wrap(const at::Tensor& tensor) { return THPVariable_Wrap(tensor); }

bool concur_unpack(PyObject* object, at::Tensor& tensor) {
  if (!THPVariable_Check(object)) return false;
  tensor = THPVariable_Unpack(object);
  return true;
}
