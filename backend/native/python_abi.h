// The few functions of CPython's stable ABI that the shim calls, and what makes them safe to use. Declared by hand: a
// virtual environment has no Python.h, and asking for python3-dev only for these would be one more thing to install.
// The interpreter that loads the shim resolves them.
#pragma once

#include <cstddef>
#include <cstdio>
#include <utility>

struct PyObject;

extern "C" {
int Py_IsInitialized();
int PyGILState_Ensure();
void PyGILState_Release(int);
PyObject* PyThreadState_GetDict();

void Py_IncRef(PyObject*);
void Py_DecRef(PyObject*);
PyObject* PyObject_CallFunctionObjArgs(PyObject*, ...);

PyObject* PyErr_Occurred();
void PyErr_Fetch(PyObject**, PyObject**, PyObject**);
void PyErr_Restore(PyObject*, PyObject*, PyObject*);
void PyErr_NormalizeException(PyObject**, PyObject**, PyObject**);
int PyErr_GivenExceptionMatches(PyObject*, PyObject*);
void PyErr_SetString(PyObject*, const char*);
void PyErr_Clear();
void PyErr_SetInterrupt();
void PyErr_WriteUnraisable(PyObject*);
int PyException_SetTraceback(PyObject*, PyObject*);

PyObject* PyDict_GetItemString(PyObject*, const char*);
int PyDict_SetItemString(PyObject*, const char*, PyObject*);
int PyDict_DelItemString(PyObject*, const char*);

PyObject* PyTuple_New(std::ptrdiff_t);
std::ptrdiff_t PyTuple_Size(PyObject*);
int PyTuple_SetItem(PyObject*, std::ptrdiff_t, PyObject*);
PyObject* PyTuple_GetItem(PyObject*, std::ptrdiff_t);

PyObject* PyLong_FromLongLong(long long);
long long PyLong_AsLongLong(PyObject*);
PyObject* PyLong_FromVoidPtr(void*);
void* PyLong_AsVoidPtr(PyObject*);
PyObject* PyFloat_FromDouble(double);
PyObject* PyBool_FromLong(long);
PyObject* PyUnicode_FromString(const char*);
PyObject* PyBytes_FromStringAndSize(const char*, std::ptrdiff_t);
PyObject* PyMemoryView_FromMemory(char*, std::ptrdiff_t, int);

extern PyObject _Py_NoneStruct;
extern PyObject* PyExc_KeyboardInterrupt;
extern PyObject* PyExc_MemoryError;
extern PyObject* PyExc_RuntimeError;
extern PyObject* PyExc_TypeError;
extern PyObject* PyExc_ValueError;
}

namespace python {

// Holds the interpreter's lock.
class Gil {
 public:
  Gil() : state_(PyGILState_Ensure()) {}
  ~Gil() { PyGILState_Release(state_); }
  Gil(const Gil&) = delete;
  Gil& operator=(const Gil&) = delete;

 private:
  int state_;
};

// An owned reference; null after a failed call, with Python's error set.
class Ref {
 public:
  explicit Ref(PyObject* object) : object_(object) {}
  ~Ref() { if (object_ != nullptr) Py_DecRef(object_); }
  Ref(const Ref&) = delete;
  Ref& operator=(const Ref&) = delete;
  PyObject* get() const { return object_; }
  explicit operator bool() const { return object_ != nullptr; }
  PyObject* release() { return std::exchange(object_, nullptr); }

 private:
  PyObject* object_;
};

inline PyObject* none() {
  Py_IncRef(&_Py_NoneStruct);
  return &_Py_NoneStruct;
}

// Sets Python's error; the format is printf's.
template <typename... Args>
void raise(PyObject* type, const char* format, Args... args) {
  char message[256];
  std::snprintf(message, sizeof(message), format, args...);
  PyErr_SetString(type, message);
}

} // namespace python
