// Our `BackendInterface` for the ExecuTorch runtime: every call becomes one call of a Python function.
//
// The Python half (`backend/native/__init__.py`) hands over three functions in `zoo_install`:
//   init(program, named_data, method, blob, blob_address, blob_size, specs) -> (object, number of inputs)
//   execute(object, inputs) -> ((address, nbytes, scalar type, sizes, owner), …), one per output
//   destroy(object)
// Python functions are called through the C API and not through ctypes callbacks: an exception that a signal raises
// at a ctypes callback's entry (Ctrl-C) would be printed and lost. Here whatever leaves the Python function is kept
// for the calling thread, and `zoo_take_error` hands it to the Python code that called ExecuTorch.
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <new>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/core/error.h>
#include <executorch/runtime/core/evalue.h>
#include <executorch/runtime/core/exec_aten/util/tensor_util.h>
#include <executorch/runtime/platform/platform.h>

#include "python_abi.h"

namespace {

using python::Gil;
using python::none;
using python::raise;
using python::Ref;

using executorch::aten::ScalarType;
using executorch::aten::SizesType;
using executorch::aten::Tensor;
using executorch::runtime::ArrayRef;
using executorch::runtime::BackendExecutionContext;
using executorch::runtime::BackendInitContext;
using executorch::runtime::BackendInterface;
using executorch::runtime::CompileSpec;
using executorch::runtime::DelegateHandle;
using executorch::runtime::Error;
using executorch::runtime::EValue;
using executorch::runtime::FreeableBuffer;
using executorch::runtime::NamedDataMap;
using executorch::runtime::PalImpl;
using executorch::runtime::Result;
using executorch::runtime::Span;

constexpr const char* kErrorKey = "backend.native.error";
constexpr int kReadOnly = 0x100; // PyBUF_READ

// False before zoo_install and again when the interpreter goes down: from then on Python is not called any more.
std::atomic<bool> live{false};
PyObject* on_init = nullptr;
PyObject* on_execute = nullptr;
PyObject* on_destroy = nullptr;
PyObject* blob_error = nullptr;

struct Handle {
  PyObject* object;
  size_t inputs;
};

// Keeps the exception that is set for `zoo_take_error` of this thread and names the ExecuTorch error it stands for.
Error keep_exception() {
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  if (value == nullptr) return Error::Internal;
  if (traceback != nullptr) PyException_SetTraceback(value, traceback);
  Error error = Error::Internal;
  if (PyErr_GivenExceptionMatches(type, blob_error)) {
    error = Error::DelegateInvalidCompatibility;
  } else if (PyErr_GivenExceptionMatches(type, PyExc_MemoryError)) {
    error = Error::MemoryAllocationFailed;
  } else if (
      PyErr_GivenExceptionMatches(type, PyExc_ValueError) || PyErr_GivenExceptionMatches(type, PyExc_TypeError)) {
    error = Error::InvalidArgument;
  }
  // The thread's own dict (borrowed): it goes with the thread, also when nobody asks for the error.
  PyObject* slot = PyThreadState_GetDict();
  if (slot == nullptr || PyDict_SetItemString(slot, kErrorKey, value) != 0) PyErr_Clear();
  Py_DecRef(type);
  Py_DecRef(value);
  if (traceback != nullptr) Py_DecRef(traceback);
  return error;
}

// Puts an owned reference into a tuple; false when `item` is null.
bool put(PyObject* tuple, size_t index, PyObject* item) {
  return item != nullptr && PyTuple_SetItem(tuple, static_cast<std::ptrdiff_t>(index), item) == 0;
}

bool is_contiguous(const Tensor& tensor) {
  const auto order = tensor.dim_order();
  for (size_t i = 0; i < order.size(); ++i) {
    if (order[i] != i) return false;
  }
  return true;
}

// (scalar type, sizes, memoryview) with the view reading the tensor's own memory.
PyObject* tensor_to_python(const Tensor& tensor, size_t index) {
  if (!is_contiguous(tensor)) {
    raise(PyExc_ValueError, "input %zu of the delegate is not in contiguous memory order", index);
    return nullptr;
  }
  static char nothing = 0;
  const size_t nbytes = tensor.nbytes();
  char* data = static_cast<char*>(const_cast<void*>(tensor.const_data_ptr()));
  if (data == nullptr && nbytes != 0) {
    raise(PyExc_ValueError, "input %zu of the delegate has no memory", index);
    return nullptr;
  }
  const auto sizes = tensor.sizes();
  Ref shape(PyTuple_New(static_cast<std::ptrdiff_t>(sizes.size())));
  if (!shape) return nullptr;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (!put(shape.get(), i, PyLong_FromLongLong(sizes[i]))) return nullptr;
  }
  Ref result(PyTuple_New(3));
  if (!result || !put(result.get(), 0, PyLong_FromLongLong(static_cast<int>(tensor.scalar_type()))) ||
      !put(result.get(), 1, shape.release()) ||
      !put(result.get(), 2,
           PyMemoryView_FromMemory(nbytes == 0 ? &nothing : data, static_cast<std::ptrdiff_t>(nbytes), kReadOnly))) {
    return nullptr;
  }
  return result.release();
}

PyObject* value_to_python(const EValue& value, size_t index) {
  if (value.isTensor()) return tensor_to_python(value.toTensor(), index);
  if (value.isInt()) return PyLong_FromLongLong(value.toInt());
  if (value.isDouble()) return PyFloat_FromDouble(value.toDouble());
  if (value.isBool()) return PyBool_FromLong(value.toBool());
  if (value.isNone()) return none();
  raise(PyExc_TypeError, "input %zu of the delegate is neither a tensor nor a number", index);
  return nullptr;
}

struct Array {
  const void* data;
  size_t nbytes;
  int scalar_type;
  std::vector<SizesType> sizes;
};

bool array_from_python(PyObject* item, Array& array) {
  if (PyTuple_Size(item) != 5) return false;
  array.data = PyLong_AsVoidPtr(PyTuple_GetItem(item, 0));
  array.nbytes = static_cast<size_t>(PyLong_AsLongLong(PyTuple_GetItem(item, 1)));
  array.scalar_type = static_cast<int>(PyLong_AsLongLong(PyTuple_GetItem(item, 2)));
  PyObject* sizes = PyTuple_GetItem(item, 3);
  const std::ptrdiff_t rank = PyTuple_Size(sizes);
  for (std::ptrdiff_t i = 0; i < rank; ++i) {
    array.sizes.push_back(static_cast<SizesType>(PyLong_AsLongLong(PyTuple_GetItem(sizes, i))));
  }
  return PyErr_Occurred() == nullptr;
}

std::string to_text(const SizesType* sizes, size_t rank) {
  std::string text = "[";
  for (size_t i = 0; i < rank; ++i) text += (i == 0 ? "" : ", ") + std::to_string(sizes[i]);
  return text + "]";
}

// Gives an output tensor its live sizes and its data. False with a Python error set when it cannot take them.
bool write_tensor(const Array& array, Tensor& tensor, size_t index) {
  if (static_cast<int>(tensor.scalar_type()) != array.scalar_type) {
    raise(PyExc_TypeError, "output %zu: the delegate returned scalar type %d, the program expects %d", index,
          array.scalar_type, static_cast<int>(tensor.scalar_type()));
    return false;
  }
  if (!is_contiguous(tensor)) {
    raise(PyExc_ValueError, "output %zu of the delegate is not in contiguous memory order", index);
    return false;
  }
  const std::string bound = to_text(tensor.sizes().data(), tensor.sizes().size());
  // The capacity is known to the tensor alone (its current sizes are those of the last call), so resizing is the check.
  if (executorch::runtime::resize_tensor(tensor, ArrayRef<SizesType>(array.sizes.data(), array.sizes.size())) !=
          Error::Ok ||
      tensor.nbytes() != array.nbytes) {
    raise(PyExc_ValueError, "output %zu: the delegate returned sizes %s, which a tensor of %s cannot take", index,
          to_text(array.sizes.data(), array.sizes.size()).c_str(), bound.c_str());
    return false;
  }
  if (array.nbytes == 0) return true;
  void* target = tensor.mutable_data_ptr();
  if (target == nullptr) {
    raise(PyExc_ValueError, "output %zu of the delegate has no memory", index);
    return false;
  }
  std::memcpy(target, array.data, array.nbytes);
  return true;
}

bool write_output(PyObject* item, EValue& value, size_t index) {
  Array array{};
  if (!array_from_python(item, array)) {
    if (PyErr_Occurred() == nullptr) raise(PyExc_TypeError, "output %zu is malformed", index);
    return false;
  }
  if (value.isTensor()) {
    Tensor tensor = value.toTensor();
    return write_tensor(array, tensor, index);
  }
  // A symbolic int that the delegate computes arrives as an int64 of one element.
  if (value.isInt() && array.scalar_type == static_cast<int>(ScalarType::Long) && array.nbytes == sizeof(int64_t)) {
    int64_t number = 0;
    std::memcpy(&number, array.data, sizeof(number));
    value = EValue(number);
    return true;
  }
  raise(PyExc_TypeError, "output %zu of the delegate is no tensor", index);
  return false;
}

PyObject* specs_to_python(ArrayRef<CompileSpec> specs) {
  Ref result(PyTuple_New(static_cast<std::ptrdiff_t>(specs.size())));
  if (!result) return nullptr;
  for (size_t i = 0; i < specs.size(); ++i) {
    Ref pair(PyTuple_New(2));
    const auto& value = specs[i].value;
    if (!pair || !put(pair.get(), 0, PyUnicode_FromString(specs[i].key)) ||
        !put(pair.get(), 1, PyBytes_FromStringAndSize(static_cast<const char*>(value.buffer),
                                                      static_cast<std::ptrdiff_t>(value.nbytes))) ||
        !put(result.get(), i, pair.release())) {
      return nullptr;
    }
  }
  return result.release();
}

class Backend final : public BackendInterface {
 public:
  bool is_available() const override { return live; }

  Result<DelegateHandle*> init(
      BackendInitContext& context,
      FreeableBuffer* processed,
      ArrayRef<CompileSpec> specs) const override {
    if (!live) return Error::InvalidState;
    Gil gil;
    // Python owns the blob's mapping from here on: it goes when the last view of it does.
    auto* blob = new (std::nothrow) FreeableBuffer(std::move(*processed));
    if (blob == nullptr) return Error::MemoryAllocationFailed;
    auto* named_data = const_cast<NamedDataMap*>(context.get_named_data_map());
    const char* method = context.get_method_name();
    Ref data(PyLong_FromVoidPtr(named_data));
    Ref name(PyUnicode_FromString(method == nullptr ? "" : method));
    Ref owner(PyLong_FromVoidPtr(blob));
    Ref address(PyLong_FromVoidPtr(const_cast<void*>(blob->data())));
    Ref size(PyLong_FromLongLong(static_cast<long long>(blob->size())));
    Ref compile_specs(specs_to_python(specs));
    if (!data || !name || !owner || !address || !size || !compile_specs) {
      delete blob;
      return keep_exception();
    }
    Ref result(PyObject_CallFunctionObjArgs(on_init, data.get(), name.get(), owner.get(), address.get(), size.get(),
                                            compile_specs.get(), nullptr));
    if (!result) return keep_exception();
    PyObject* object = PyTuple_GetItem(result.get(), 0);
    PyObject* count = PyTuple_GetItem(result.get(), 1);
    if (object == nullptr || count == nullptr) return keep_exception();
    const long long inputs = PyLong_AsLongLong(count);
    if (PyErr_Occurred() != nullptr) return keep_exception();
    Py_IncRef(object);
    return new Handle{object, static_cast<size_t>(inputs)};
  }

  Error execute(BackendExecutionContext&, DelegateHandle* raw, Span<EValue*> args) const override {
    if (!live) return Error::InvalidState;
    Gil gil;
    auto* handle = static_cast<Handle*>(raw);
    if (handle->inputs > args.size()) {
      raise(PyExc_TypeError, "the delegate takes %zu inputs, the program gives it %zu values", handle->inputs,
            args.size());
      return keep_exception();
    }
    Ref inputs(PyTuple_New(static_cast<std::ptrdiff_t>(handle->inputs)));
    if (!inputs) return keep_exception();
    for (size_t i = 0; i < handle->inputs; ++i) {
      if (!put(inputs.get(), i, value_to_python(*args[i], i))) return keep_exception();
    }
    Ref outputs(PyObject_CallFunctionObjArgs(on_execute, handle->object, inputs.get(), nullptr));
    if (!outputs) return keep_exception();
    const std::ptrdiff_t returned = PyTuple_Size(outputs.get());
    const size_t expected = args.size() - handle->inputs;
    if (returned != static_cast<std::ptrdiff_t>(expected)) {
      raise(PyExc_TypeError, "the delegate returned %zd outputs, the program expects %zu", returned, expected);
      return keep_exception();
    }
    for (size_t i = 0; i < expected; ++i) {
      PyObject* item = PyTuple_GetItem(outputs.get(), static_cast<std::ptrdiff_t>(i));
      if (item == nullptr || !write_output(item, *args[handle->inputs + i], i)) return keep_exception();
    }
    return Error::Ok;
  }

  void destroy(DelegateHandle* raw) const override {
    // Without an interpreter the object is left to the end of the process.
    if (raw == nullptr || !live || !Py_IsInitialized()) return;
    Gil gil;
    auto* handle = static_cast<Handle*>(raw);
    // Programs are also freed while an exception is on its way up: it must come out as it went in.
    PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
    PyErr_Fetch(&type, &value, &traceback);
    bool interrupted = false;
    for (int attempt = 0; attempt < 2; ++attempt) {
      Ref done(PyObject_CallFunctionObjArgs(on_destroy, handle->object, nullptr));
      if (done) break;
      if (PyErr_GivenExceptionMatches(PyErr_Occurred(), PyExc_KeyboardInterrupt)) {
        PyErr_Clear();
        interrupted = true;
        continue;
      }
      PyErr_WriteUnraisable(on_destroy);
      break;
    }
    Py_DecRef(handle->object);
    delete handle;
    PyErr_Restore(type, value, traceback);
    if (interrupted) PyErr_SetInterrupt(); // destroy cannot fail, so the Ctrl-C comes again right after it
  }
};

// ExecuTorch prints its reasons to stderr. While a thread asks for them (zoo_log_begin) they are collected instead.
thread_local std::string* log_text = nullptr;
decltype(PalImpl::emit_log_message) previous_log = nullptr;

void emit_log(et_timestamp_t timestamp, et_pal_log_level_t level, const char* filename, const char* function,
              size_t line, const char* message, size_t length) {
  // What is fatal ends the process right after it: it is printed in any case.
  if (log_text != nullptr && level != et_pal_log_level_t::kFatal) {
    if (level == et_pal_log_level_t::kError && log_text->size() < 4096) log_text->append(message, length).append("\n");
  } else if (previous_log != nullptr) {
    previous_log(timestamp, level, filename, function, line, message, length);
  }
}

Backend backend;

} // namespace

extern "C" {

// Registers the backend under `id` and sets the Python functions. 0, or the ExecuTorch error code.
int zoo_install(const char* id, PyObject* init, PyObject* execute, PyObject* destroy, PyObject* error) {
  for (PyObject* object : {init, execute, destroy, error}) Py_IncRef(object);
  on_init = init;
  on_execute = execute;
  on_destroy = destroy;
  blob_error = error;
  live = true;
  const Error result = executorch::runtime::register_backend({id, &backend});
  if (result != Error::Ok) {
    live = false;
    return static_cast<int>(result);
  }
  // In place: `register_pal` prints a line whenever somebody (here the Python bindings) has registered before.
  auto* platform = const_cast<PalImpl*>(executorch::runtime::get_pal_impl());
  previous_log = platform->emit_log_message;
  platform->emit_log_message = emit_log;
  return 0;
}

// No call of Python after this one: the interpreter is going down.
void zoo_shutdown() {
  live = false;
}

// The bytes of `key`: fills `data` and `size` and returns the buffer that owns them, to be freed with
// zoo_free_buffer; null with ExecuTorch's error code in `size` when there is none.
void* zoo_get_data(const void* named_data, const char* key, size_t key_size, const void** data, size_t* size) {
  auto result = static_cast<const NamedDataMap*>(named_data)->get_data(std::string_view(key, key_size));
  if (!result.ok()) {
    *size = static_cast<size_t>(result.error());
    return nullptr;
  }
  auto* buffer = new FreeableBuffer(std::move(result.get()));
  *data = buffer->data();
  *size = buffer->size();
  return buffer;
}

void zoo_free_buffer(void* buffer) {
  delete static_cast<FreeableBuffer*>(buffer);
}

// The exception that the last failed call on this thread raised, or None; asking forgets it.
PyObject* zoo_take_error() {
  PyObject* slot = PyThreadState_GetDict();
  PyObject* error = slot == nullptr ? nullptr : PyDict_GetItemString(slot, kErrorKey);
  if (error == nullptr) return none();
  Py_IncRef(error);
  if (PyDict_DelItemString(slot, kErrorKey) != 0) PyErr_Clear();
  return error;
}

void zoo_log_begin() {
  if (log_text == nullptr) log_text = new std::string();
}

// ExecuTorch's error messages since zoo_log_begin on this thread, one a line.
PyObject* zoo_log_end() {
  std::string text = log_text == nullptr ? std::string() : *log_text;
  delete log_text;
  log_text = nullptr;
  return PyBytes_FromStringAndSize(text.data(), static_cast<std::ptrdiff_t>(text.size()));
}
}
