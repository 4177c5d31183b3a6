// The bindings' half of the shim: tensors and exceptions between C++ and Python, as torch's own bindings treat them.
#include <Python.h>
#include <new>
#include <stdexcept>
#include <c10/util/Exception.h>

#ifdef CONCUR_PLAIN_VARIABLE
// What python_variable.h declares of a tensor's Python object, which costs 26 core-seconds to read: `Prepared` has found the same there.
namespace at { class TensorBase; }
struct THPVariable {
  PyObject_HEAD
  void* cdata;  // an at::Tensor, which is a pointer (concur_shim.cpp asserts it)
};
extern PyObject* THPVariableClass;
extern PyObject* ParameterClass;
PyObject* THPVariable_Wrap(const at::TensorBase& var);

namespace concur {
void retain(void* impl) noexcept;  // of concur_shim.cpp, which this is linked with
void release(void* impl) noexcept;

namespace {
bool is_tensor(PyObject* object) {
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  if (!THPVariableClass) return false;
  if (type == THPVariableClass || type == ParameterClass) return true;
  const int found = PyObject_IsInstance(object, THPVariableClass);
  if (found == -1) throw std::runtime_error("");
  return found;
}
}  // namespace

PyObject* wrap(const void* tensor) { return THPVariable_Wrap(*static_cast<const at::TensorBase*>(tensor)); }

bool unpack(PyObject* object, void* tensor) {
  if (!is_tensor(object)) return false;
  auto& target = *static_cast<void**>(tensor);
  void* const impl = reinterpret_cast<THPVariable*>(object)->cdata;
  retain(impl);
  release(target);
  target = impl;
  return true;
}
}  // namespace concur
#else
#include <torch/csrc/autograd/python_variable.h>

namespace concur {
PyObject* wrap(const void* tensor) { return THPVariable_Wrap(*static_cast<const at::Tensor*>(tensor)); }

bool unpack(PyObject* object, void* tensor) {
  if (!THPVariable_Check(object)) return false;
  *static_cast<at::Tensor*>(tensor) = THPVariable_Unpack(object);
  return true;
}
}  // namespace concur
#endif

namespace concur {
void translate_exception() noexcept {
  try {
    throw;
  } catch (const c10::IndexError& e) {
    PyErr_SetString(PyExc_IndexError, e.what_without_backtrace());
  } catch (const c10::ValueError& e) {
    PyErr_SetString(PyExc_ValueError, e.what_without_backtrace());
  } catch (const c10::TypeError& e) {
    PyErr_SetString(PyExc_TypeError, e.what_without_backtrace());
  } catch (const c10::NotImplementedError& e) {
    PyErr_SetString(PyExc_NotImplementedError, e.what_without_backtrace());
  } catch (const c10::OutOfMemoryError& e) {
    PyObject* torch = PyImport_ImportModule("torch");
    PyObject* kind = torch ? PyObject_GetAttrString(torch, "OutOfMemoryError") : nullptr;
    PyErr_Clear();
    PyErr_SetString(kind ? kind : PyExc_RuntimeError, e.what_without_backtrace());
    Py_XDECREF(kind);
    Py_XDECREF(torch);
  } catch (const c10::Error& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what_without_backtrace());
  } catch (const std::out_of_range& e) {
    PyErr_SetString(PyExc_IndexError, e.what());
  } catch (const std::invalid_argument& e) {
    PyErr_SetString(PyExc_ValueError, e.what());
  } catch (const std::domain_error& e) {
    PyErr_SetString(PyExc_ValueError, e.what());
  } catch (const std::length_error& e) {
    PyErr_SetString(PyExc_ValueError, e.what());
  } catch (const std::range_error& e) {
    PyErr_SetString(PyExc_ValueError, e.what());
  } catch (const std::overflow_error& e) {
    PyErr_SetString(PyExc_OverflowError, e.what());
  } catch (const std::bad_alloc& e) {
    PyErr_SetString(PyExc_MemoryError, e.what());
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
  } catch (...) {
    PyErr_SetString(PyExc_RuntimeError, "unknown C++ exception");
  }
}
}  // namespace concur
