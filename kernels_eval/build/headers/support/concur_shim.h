// Two functions compiled once per (torch, Python, compiler): candidates' bindings use them instead of including torch's Python headers.
#pragma once
#include <Python.h>
namespace at { class Tensor; }
extern "C++" {
PyObject* concur_wrap(const at::Tensor& tensor);            // new reference, or nullptr with a Python error set
bool concur_unpack(PyObject* object, at::Tensor& tensor);   // false where the object is not a tensor; sets no error
}
