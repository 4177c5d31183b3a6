// Python bindings without pybind11 for the argument and result types that candidates use. An unsupported type is a static_assert: the
// build then falls back to torch's own header and pybind11. Semantics follow pybind11: positional arguments, TypeError where they do
// not fit, C++ exceptions become RuntimeError (IndexError and ValueError for their std counterparts).
#pragma once
#include <Python.h>
#include <concur/core.h>
#include <tuple>
#include <vector>

namespace concur {
PyObject* wrap(const void* tensor);            // new reference, or nullptr with a Python error set
bool unpack(PyObject* object, void* tensor);   // false where the object is not a tensor; sets no error
void translate_exception() noexcept;           // the C++ exception that is being handled becomes the Python error

template <class T> inline constexpr bool always_false = false;

// A value taken from Python: `stored` owns it while the call lasts.
template <class T, class = void> struct From {
  static_assert(always_false<T>, "argument type not supported by the lite bindings");
};

template <> struct From<at::Tensor> {
  at::Tensor stored;
  bool load(PyObject* o) { if (o == Py_None) { stored = at::Tensor(); return true; } return unpack(o, &stored); }
  at::Tensor& get() { return stored; }
};

template <class T> struct From<T, std::enable_if_t<std::is_integral_v<T> && !std::is_same_v<T, bool>>> {
  T stored{};
  bool load(PyObject* o) {
    if (PyFloat_Check(o)) return false;
    PyObject* index = PyNumber_Index(o);
    if (!index) { PyErr_Clear(); return false; }
    if constexpr (std::is_unsigned_v<T>) {
      unsigned long long v = PyLong_AsUnsignedLongLong(index);
      Py_DECREF(index);
      if (PyErr_Occurred() || v != static_cast<unsigned long long>(static_cast<T>(v))) { PyErr_Clear(); return false; }
      stored = static_cast<T>(v);
    } else {
      long long v = PyLong_AsLongLong(index);
      Py_DECREF(index);
      if (PyErr_Occurred() || v != static_cast<long long>(static_cast<T>(v))) { PyErr_Clear(); return false; }
      stored = static_cast<T>(v);
    }
    return true;
  }
  T& get() { return stored; }
};

template <> struct From<bool> {
  bool stored{};
  bool load(PyObject* o) {
    if (o != Py_True && o != Py_False && o != Py_None) return false;
    stored = (o == Py_True);
    return true;
  }
  bool& get() { return stored; }
};

template <class T> struct From<T, std::enable_if_t<std::is_floating_point_v<T>>> {
  T stored{};
  bool load(PyObject* o) {
    double v = PyFloat_AsDouble(o);
    if (v == -1.0 && PyErr_Occurred()) { PyErr_Clear(); return false; }
    stored = static_cast<T>(v);
    return true;
  }
  T& get() { return stored; }
};

#ifdef CONCUR_STRING
template <> struct From<std::string> {
  std::string stored;
  bool load(PyObject* o) {
    if (!PyUnicode_Check(o)) return false;
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(o, &size);
    if (!text) { PyErr_Clear(); return false; }
    stored.assign(text, static_cast<size_t>(size));
    return true;
  }
  std::string& get() { return stored; }
};
#endif

template <class T> struct From<std::vector<T>> {
  std::vector<T> stored;
  bool load(PyObject* o) {
    if (!PyList_Check(o) && !PyTuple_Check(o)) return false;
    Py_ssize_t n = PySequence_Size(o);
    stored.reserve(static_cast<size_t>(n));
    for (Py_ssize_t i = 0; i < n; ++i) {
      PyObject* item = PySequence_GetItem(o, i);
      From<T> element;
      bool ok = item && element.load(item);
      Py_XDECREF(item);
      if (!ok) { PyErr_Clear(); return false; }
      stored.push_back(std::move(element.get()));
    }
    return true;
  }
  std::vector<T>& get() { return stored; }
};

template <> struct From<c10::ArrayRef<int64_t>> {
  From<std::vector<int64_t>> items;
  c10::ArrayRef<int64_t> stored;
  bool load(PyObject* o) {
    if (!items.load(o)) return false;
    stored = items.get();
    return true;
  }
  c10::ArrayRef<int64_t>& get() { return stored; }
};

template <class T> struct From<std::optional<T>> {
  std::optional<T> stored;
  bool load(PyObject* o) {
    if (o == Py_None) return true;
    From<T> value;
    if (!value.load(o)) return false;
    stored = std::move(value.get());
    return true;
  }
  std::optional<T>& get() { return stored; }
};

template <class T> PyObject* to_python(const T& value);

template <class... T, size_t... I> PyObject* tuple_to_python(const std::tuple<T...>& value, std::index_sequence<I...>) {
  PyObject* items[] = {to_python(std::get<I>(value))...};
  PyObject* tuple = PyTuple_New(sizeof...(T));
  bool ok = tuple != nullptr;
  for (size_t i = 0; i < sizeof...(T); ++i) {
    if (!items[i]) ok = false;
    if (tuple) PyTuple_SET_ITEM(tuple, static_cast<Py_ssize_t>(i), items[i]);
  }
  if (!ok) { Py_XDECREF(tuple); return nullptr; }
  return tuple;
}

template <class T> struct is_vector : std::false_type {};
template <class T> struct is_vector<std::vector<T>> : std::true_type {};
template <class T> struct is_tuple : std::false_type {};
template <class... T> struct is_tuple<std::tuple<T...>> : std::true_type {};
template <class A, class B> struct is_tuple<std::pair<A, B>> : std::false_type {};

template <class T> PyObject* to_python(const T& value) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    return wrap(&value);
  } else if constexpr (std::is_same_v<T, bool>) {
    return PyBool_FromLong(value);
  } else if constexpr (std::is_integral_v<T> && std::is_unsigned_v<T>) {
    return PyLong_FromUnsignedLongLong(value);
  } else if constexpr (std::is_integral_v<T>) {
    return PyLong_FromLongLong(value);
  } else if constexpr (std::is_floating_point_v<T>) {
    return PyFloat_FromDouble(value);
  } else if constexpr (is_vector<T>::value) {
    PyObject* list = PyList_New(static_cast<Py_ssize_t>(value.size()));
    for (size_t i = 0; list && i < value.size(); ++i) {
      PyObject* item = to_python(value[i]);
      if (!item) { Py_DECREF(list); return nullptr; }
      PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), item);
    }
    return list;
  } else if constexpr (is_tuple<T>::value) {
    return tuple_to_python(value, std::make_index_sequence<std::tuple_size_v<T>>());
  } else {
    static_assert(always_false<T>, "result type not supported by the lite bindings");
  }
}

template <class T> using Held = From<std::remove_cv_t<std::remove_reference_t<T>>>;

template <class T> decltype(auto) pass(Held<T>& held) {
  if constexpr (std::is_lvalue_reference_v<T>) return static_cast<T>(held.get());
  else return static_cast<std::remove_reference_t<T>&&>(held.get());
}

template <class F> struct Caller;

template <class R, class... A> struct Caller<R (*)(A...)> {
  template <size_t... I> static PyObject* run(R (*function)(A...), PyObject* args, std::index_sequence<I...>) {
    if (PyTuple_GET_SIZE(args) != static_cast<Py_ssize_t>(sizeof...(A))) {
      PyErr_Format(PyExc_TypeError, "incompatible function arguments: %zd given, %zu expected", PyTuple_GET_SIZE(args), sizeof...(A));
      return nullptr;
    }
    std::tuple<Held<A>...> held;
    bool fits[] = {true, std::get<I>(held).load(PyTuple_GET_ITEM(args, static_cast<Py_ssize_t>(I)))...};
    for (size_t i = 1; i < sizeof(fits) / sizeof(fits[0]); ++i) {
      if (!fits[i]) {
        PyErr_Format(PyExc_TypeError, "incompatible function arguments: argument %zu is a %s", i,
                     Py_TYPE(PyTuple_GET_ITEM(args, static_cast<Py_ssize_t>(i - 1)))->tp_name);
        return nullptr;
      }
    }
    try {
      if constexpr (std::is_void_v<R>) {
        function(pass<A>(std::get<I>(held))...);
        Py_RETURN_NONE;
      } else {
        return to_python<std::remove_cv_t<std::remove_reference_t<R>>>(function(pass<A>(std::get<I>(held))...));
      }
    } catch (...) {
      translate_exception();
    }
    return nullptr;
  }
};

template <class R, class... A> PyObject* dispatch(R (*function)(A...), PyObject* args) {
  return Caller<R (*)(A...)>::run(function, args, std::index_sequence_for<A...>());
}

}  // namespace concur

#define CONCUR_STRING2(x) #x
#define CONCUR_STRING(x) CONCUR_STRING2(x)
#define CONCUR_CONCAT2(a, b) a##b
#define CONCUR_CONCAT(a, b) CONCUR_CONCAT2(a, b)
