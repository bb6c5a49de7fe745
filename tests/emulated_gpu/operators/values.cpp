/* torch's CUDA operators with values: each runs its CPU kernel, over the same bytes.

   Memory of the emulated GPU is the host's, so a CUDA tensor can be looked at as a CPU tensor without a copy. One boxed
   function takes the place of every CUDA kernel in `aten` that has a CPU kernel beside it, and calls the operator again
   with such tensors, at once, but not before the current stream has done what it was given (`stream.c`). Operators that
   allocate, or make views, stay torch's own. Those without a CPU kernel raise. */

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/List.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <mutex>
#include <regex>
#include <unordered_map>

extern "C" { /* of libcuda.so.1: see gpu.h */
int gpu_is_capturing(void);
void gpu_call(void (*function)(void *), void *argument, void *stream);
void gpu_catch_up(void *stream);
void gpu_copy(void *to, const void *from, size_t bytes, void *stream);
}

namespace {

using c10::IValue;
using torch::jit::Stack;

c10::Stream current_stream(c10::Device device) { return c10::impl::VirtualGuardImpl(c10::kCUDA).getStream(device); }
void *handle_of(c10::Stream stream) { return c10::impl::VirtualGuardImpl(c10::kCUDA).getStreamNativeHandle(stream); }
void catch_up(c10::Device device) { gpu_catch_up(handle_of(current_stream(device))); }

/* A CPU tensor over the bytes of a CUDA tensor, whose storage it keeps. Once resized, it has memory of its own. */
at::Tensor on_host(const at::Tensor &device) {
    if (!device.defined() || !device.is_cuda()) return device;
    const c10::Storage &storage = device.storage();
    auto release = [](void *kept) { delete static_cast<c10::Storage *>(kept); };
    c10::DataPtr bytes(storage.mutable_data(), new c10::Storage(storage), release, c10::Device(c10::kCPU));
    c10::Storage same(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(bytes), c10::GetCPUAllocator(), true);
    const c10::DispatchKeySet keys(c10::DispatchKey::CPU);
    auto host = at::detail::make_tensor<c10::TensorImpl>(std::move(same), keys, device.dtype());
    host.unsafeGetTensorImpl()->set_sizes_and_strides(device.sizes(), device.strides(), device.storage_offset());
    if (device.is_conj()) host._set_conj(true);
    if (device.is_neg()) host._set_neg(true);
    return host;
}

/* The CPU's generator of random numbers that stands for one of CUDA's, from the same seed on. */
at::Generator on_host(const at::Generator &device) {
    static std::mutex lock;
    static std::unordered_map<c10::GeneratorImpl *, at::Generator> known;
    if (!device.defined() || device.device().is_cpu()) return device;
    std::lock_guard<std::mutex> guard(lock);
    at::Generator &host = known[device.unsafeGetGeneratorImpl()];
    if (!host.defined() || host.current_seed() != device.current_seed())
        host = at::detail::createCPUGenerator(device.current_seed());
    return host;
}

/* One call of an operator: its arguments go to the host, its results to the device. */
class Call {
  public:
    std::optional<c10::Device> device; /* once an argument has shown it */

    IValue to_host(const IValue &value) {
        if (value.isTensor()) return to_host(value.toTensor());
        if (value.isTensorList()) {
            c10::List<at::Tensor> list;
            for (const at::Tensor &each : value.toTensorVector()) list.push_back(to_host(each));
            return list;
        }
        if (value.isOptionalTensorList()) {
            c10::List<std::optional<at::Tensor>> list;
            for (const std::optional<at::Tensor> &each : value.toOptionalTensorVector())
                list.push_back(each ? std::optional<at::Tensor>(to_host(*each)) : std::nullopt);
            return list;
        }
        if (value.isDevice() && value.toDevice().is_cuda()) {
            device = value.toDevice();
            return c10::Device(c10::kCPU);
        }
        if (value.isGenerator()) return on_host(value.toGenerator());
        return value;
    }

    IValue to_device(const IValue &value) {
        if (value.isTensor()) return to_device(value.toTensor());
        if (!value.isTensorList()) return value;
        c10::List<at::Tensor> list;
        for (const at::Tensor &each : value.toTensorVector()) list.push_back(to_device(each));
        return list;
    }

    /* Give CUDA tensors the size that the kernel has given to theirs on the host: `out` of many operators. */
    void resize() {
        for (const auto &[device, host] : seen) {
            if (device.sizes() == host.sizes() && device.strides() == host.strides()) continue;
            device.resize_(host.sizes());
            device.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), device.storage_offset());
            on_host(device).copy_(host);
        }
    }

  private:
    std::vector<std::pair<at::Tensor, at::Tensor>> seen; /* on the device, on the host */

    at::Tensor to_host(const at::Tensor &tensor) {
        if (!tensor.defined() || !tensor.is_cuda()) return tensor;
        device = tensor.device();
        for (const auto &[device, host] : seen)
            if (device.is_same(tensor)) return host;
        seen.emplace_back(tensor, on_host(tensor));
        return seen.back().second;
    }

    at::Tensor to_device(const at::Tensor &tensor) {
        if (!tensor.defined() || !device) return tensor;
        for (const auto &[device, host] : seen)
            if (host.is_same(tensor)) return device;
        const auto options = tensor.options().device(*device);
        at::Tensor result = tensor.is_non_overlapping_and_dense() ? at::empty_strided(tensor.sizes(), tensor.strides(), options)
                                                                  : at::empty(tensor.sizes(), options);
        on_host(result).copy_(tensor);
        return result;
    }
};

/* A call in a CUDA graph, kept as long as the process. A launch calls again, with results where they were first. */
struct Captured {
    c10::OperatorHandle op;
    Stack arguments; /* on the host */
    std::vector<at::Tensor> results;

    static void repeat(void *captured) {
        const auto *call = static_cast<const Captured *>(captured);
        c10::InferenceMode mode;
        Stack stack = call->arguments;
        call->op.callBoxed(&stack);
        const std::vector<at::Tensor> again = tensors_of(stack.begin(), stack.end());
        for (size_t n = 0; n < again.size(); n++)
            if (again[n].data_ptr() != call->results[n].data_ptr()) call->results[n].copy_(again[n]);
    }

    static std::vector<at::Tensor> tensors_of(Stack::iterator first, Stack::iterator end) {
        std::vector<at::Tensor> found;
        for (auto value = first; value != end; value++) {
            if (value->isTensor() && value->toTensor().defined()) found.push_back(on_host(value->toTensor()));
            if (value->isTensorList())
                for (const at::Tensor &each : value->toTensorVector()) found.push_back(on_host(each));
        }
        return found;
    }
};

void run_on_host(const c10::OperatorHandle &op, c10::DispatchKeySet, Stack *stack) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const auto first = stack->size() - op.schema().arguments().size();
    const bool is_captured = gpu_is_capturing();
    Call call;
    for (size_t n = first; n < stack->size(); n++) (*stack)[n] = call.to_host((*stack)[n]);
    if (call.device) catch_up(*call.device);
    Stack arguments;
    if (is_captured) arguments.assign(stack->begin() + first, stack->end());
    op.callBoxed(stack);
    call.resize();
    for (size_t n = first; n < stack->size(); n++) (*stack)[n] = call.to_device((*stack)[n]);
    if (!is_captured) return;
    auto results = Captured::tensors_of(stack->begin() + first, stack->end());
    gpu_call(Captured::repeat, new Captured{op, std::move(arguments), std::move(results)}, nullptr);
}

/* A copy of the device, or of page-locked memory where nobody waits for it, is the stream's. */
void copy(const c10::OperatorHandle &op, c10::DispatchKeySet keys, Stack *stack) {
    const at::Tensor to = torch::jit::peek(*stack, 0, 3).toTensor(), from = torch::jit::peek(*stack, 1, 3).toTensor();
    const at::Tensor &device = to.is_cuda() ? to : from, &other = to.is_cuda() ? from : to;
    const bool is_alike = to.sizes() == from.sizes() && to.dtype() == from.dtype() && to.is_contiguous() &&
                          from.is_contiguous() && !from.is_conj() && !from.is_neg();
    const bool is_beside = torch::jit::peek(*stack, 2, 3).toBool() && other.is_cpu() && other.is_pinned();
    if (gpu_is_capturing() || !is_alike || !(is_beside || other.device() == device.device())) return run_on_host(op, keys, stack);
    const c10::Stream stream = current_stream(device.device());
    gpu_copy(to.data_ptr(), from.data_ptr(), to.nbytes(), handle_of(stream));
    if (is_beside) at::getHostAllocator(at::kCUDA)->record_event(other.data_ptr(), other.storage().data_ptr().get_context(), stream);
    torch::jit::drop(*stack, 2);
}

void refuse(const c10::OperatorHandle &op, c10::DispatchKeySet, Stack *) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "the emulated GPU has no values for ", op.operator_name(), ", which has no CPU kernel");
}

/* Whether an operator allocates, or says something of a tensor without looking at its values. */
bool looks_at_no_values(const c10::FunctionSchema &schema) {
    static const std::regex names(
        "aten::((empty|new_empty|resize|_resize_output|as_strided|view|_cudnn|cudnn|miopen|_nested).*|set_|set_data|"
        "_reshape_alias|unfold|is_set_to|record_stream|is_pinned|_pin_memory|_fused_sdp_choice|_efficientzerotensor)");
    if (std::regex_match(schema.name(), names)) return true;
    for (const c10::Argument &result : schema.returns())
        if (result.alias_info() && !result.alias_info()->isWrite()) return true; /* a view */
    return false;
}

class Replacement {
  public:
    int on_host = 0, refused = 0; /* operators */

    Replacement() {
        auto &dispatcher = c10::Dispatcher::singleton();
        for (const c10::OperatorName &name : dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CUDA)) {
            const auto op = dispatcher.findSchema(name);
            if (name.name.rfind("aten::", 0) != 0 || !op || looks_at_no_values(op->schema())) continue;
            const bool has_cpu_kernel = op->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU);
            has_cpu_kernel ? replace<&run_on_host>(name) : replace<&refuse>(name);
            (has_cpu_kernel ? on_host : refused)++;
        }
        /* Its one kernel is for all devices, and first makes a tensor contiguous with kernels of the GPU. */
        replace<&copy>({"aten::copy_", ""});
    }

  private:
    torch::Library library{torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__};

    template <c10::BoxedKernel::BoxedKernelFunction_withDispatchKeys *kernel> void replace(const c10::OperatorName &name) {
        const std::string overload = name.overload_name.empty() ? "" : "." + name.overload_name;
        const std::string own = name.name.substr(strlen("aten::")) + overload;
        library.impl(own.c_str(), torch::CppFunction::makeFromBoxedFunction<kernel>());
    }
};

at::Tensor host(const at::Tensor &tensor) {
    if (tensor.is_cuda()) catch_up(tensor.device());
    return on_host(tensor);
}

std::tuple<int64_t, int64_t> replace_operators() {
    static Replacement made;
    return {made.on_host, made.refused};
}

TORCH_LIBRARY(emulated_gpu, library) {
    library.def("host(Tensor x) -> Tensor");
    library.impl("host", c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(host));
    library.def("replace_operators() -> (int, int)", replace_operators);
}

}  // namespace
